"""What the benchmarks of served models share: load, servers, statistics, targets and reports."""
