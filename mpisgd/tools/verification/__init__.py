"""`python -m mpisgd verify`: every mode of training, compared with one process or with its definition."""
