"""Parameters of which a host keeps one copy, and whose updates its ranks divide among themselves."""
