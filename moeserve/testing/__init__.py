"""Public helpers for tests: tiny models, fakes, a multi-process harness, a fake clock."""
