"""Ranks with models of their own, which mix with those of a few neighbours."""
