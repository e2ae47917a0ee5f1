"""The adaptive sum."""
