"""Compression between hosts alone."""
