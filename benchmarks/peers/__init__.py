"""Other systems that serve the same checkpoint, each in an environment of its own, and how they are set up."""
