"""Asynchronous gossip."""
