"""The commands behind `python -m mpisgd bench`."""
