"""OpenAI's Responses API, `/v1/responses`: its items translated into chats, and back."""
