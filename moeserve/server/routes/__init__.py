"""HTTP routes: each file builds the router of one group of endpoints."""
