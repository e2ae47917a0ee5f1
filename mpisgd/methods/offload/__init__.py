"""State, or all of a model, in files."""
