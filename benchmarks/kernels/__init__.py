"""What the kernel benchmark and the tuner share: shapes, clocks and the ceilings of the machine."""
