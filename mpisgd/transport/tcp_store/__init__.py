"""The key-value store by which torch's process groups find each other, brought up over MPI."""
