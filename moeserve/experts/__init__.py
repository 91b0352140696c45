"""Experts on their ranks: dispatcher and expert store."""
