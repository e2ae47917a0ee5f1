"""The commands behind `python -m mpisgd`, one file each, and `run_program` for programs of one's own."""
