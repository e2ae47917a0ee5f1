"""Models, gradients and optimizers over the ranks of a job."""
