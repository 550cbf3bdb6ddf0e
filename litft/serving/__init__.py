"""An OpenAI-compatible server with a chat page."""
