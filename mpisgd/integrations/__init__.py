"""Training frameworks on top of torch.distributed: a module for each, imported by those who use it."""
