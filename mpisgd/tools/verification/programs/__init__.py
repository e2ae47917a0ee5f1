"""Training programs as data: carried out on ranks, by their definition, and compared."""
