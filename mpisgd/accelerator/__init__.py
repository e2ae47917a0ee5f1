"""What mpisgd needs of torch.cuda, behind an interface, and copies between host and device."""
