"""How messages, bytes and work of each rank grow with hosts and ranks, counted on ranks that are threads."""
