"""The HTTP server: an OpenAI-compatible API over any `EngineClient`."""
