"""Metrics of the frontend."""
