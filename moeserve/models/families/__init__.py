"""One file per model family: its defaults, its `config.json` as layer specs, and its names in a checkpoint."""
