"""One training step of each strategy: its tasks, its bytes, its memory."""
