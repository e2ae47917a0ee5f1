"""The engine: groups of ranks, and tensors that travel between them. It knows no model and no optimizer."""
