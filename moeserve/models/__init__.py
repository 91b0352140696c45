"""Hugging Face config to model spec, one decoder built from the spec, and the checkpoint loader."""
