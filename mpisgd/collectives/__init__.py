"""The collectives, one per file: torch.distributed's names and order, on the queue of a group."""
