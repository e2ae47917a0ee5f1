"""Parameters of which a host has one copy, and of which each of its ranks updates its own ones."""
