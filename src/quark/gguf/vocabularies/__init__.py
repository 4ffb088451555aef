"""How GGUF spells each kind of vocabulary, and what its readers cannot do of it."""
