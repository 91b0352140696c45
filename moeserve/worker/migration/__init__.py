"""Online placement on a rank: what it says to the frontend, and what it does between two steps."""

from moeserve.worker.migration.online_placement import OnlinePlacement, start_online_placement

__all__ = ["OnlinePlacement", "start_online_placement"]
