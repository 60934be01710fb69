"""From what callers pass to checked requests: options, chats, prompts, tokens."""
