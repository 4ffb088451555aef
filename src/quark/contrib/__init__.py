"""Address; see llm_eval."""
