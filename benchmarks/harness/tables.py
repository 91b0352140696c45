"""Tables in Markdown, which read as well on a terminal: those of the load generator's reports."""

from moeserve.loadgen.tables import Cell, table

__all__ = ["Cell", "table"]
