"""Protocols without code: what the engine asks of transports, of MPI and of the job; it imports none."""
