"""The engine: prompts are read once, their memory is forked, and all trials decode in one batch."""
