"""Optimizer state in files: in memory only while it is worked on."""
