"""Decisions without torch: requests, KV block pool, scheduler, and the loop that steps them."""
