"""The HTTP frontend: OpenAI-compatible API, request journal, engine registry."""
