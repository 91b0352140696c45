"""The launcher: command line, topology, and the one place that builds the object graph."""
