"""Decentralized parallel SGD."""
