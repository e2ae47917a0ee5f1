"""`python -m mpisgd plan`: what a training step would take on a cluster, before there is a job."""
