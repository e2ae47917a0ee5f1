"""The collectives, one per file: torch.distributed's names and order, on the lane of a group."""
