"""Sharded data parallelism: gradients, optimizer state and parameters are divided among the ranks."""
