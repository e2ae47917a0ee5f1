"""Point-to-point messages: what the algorithms, the consistency check and the user send over MPI."""
