"""Online expert placement as the frontend runs it: loads in, changes out, and what operators see and order."""
