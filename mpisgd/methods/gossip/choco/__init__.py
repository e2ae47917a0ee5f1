"""Gossip by compressed changes."""
