"""`Gossip`: every rank has a model of its own, and mixes it with those of a few neighbours."""
