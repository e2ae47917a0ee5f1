"""The definitions that modes are compared with: all ranks in one process, without the engine."""
