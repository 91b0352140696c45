"""The MoE kernel library: one folder an op, each with an oracle."""
