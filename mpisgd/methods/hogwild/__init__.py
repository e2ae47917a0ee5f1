"""Updates of one copy of the parameters by all ranks of a host, without locks."""
