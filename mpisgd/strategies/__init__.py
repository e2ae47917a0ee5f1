"""How the ranks' models relate between two steps: one strategy per file."""
