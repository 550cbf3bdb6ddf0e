"""A server with OpenAI's API and a chat page."""
