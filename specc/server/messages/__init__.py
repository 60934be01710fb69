"""Anthropic's Messages API: requests become chats, and answers blocks."""
