"""Experts that move between ranks while the engine serves: places, records over TCP, and changes that are staged."""
