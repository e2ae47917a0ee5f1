"""`bench layout`: a user's program in every sensible number of ranks and threads on this host."""
