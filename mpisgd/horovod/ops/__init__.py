"""Horovod's operations on tensors, one kind in each module, and the handles of those under way."""
