"""Training frameworks on top of torch.distributed: one module for each, imported by its users."""
