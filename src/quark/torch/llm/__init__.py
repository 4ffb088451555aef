"""Texts of language models: windows of tokens, documents, chats, datasets by name."""
