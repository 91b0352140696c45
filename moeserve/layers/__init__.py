"""The parts of a decoder: linear, norm, rope, embedding, attention, MoE."""
