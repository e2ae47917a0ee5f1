"""One copy of the parameters for all ranks of a host."""
