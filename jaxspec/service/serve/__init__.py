"""An engine behind OpenAI's HTTP API (extra `serve`)."""
