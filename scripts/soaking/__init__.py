"""Whether long jobs stay as they are: the programs behind `./scripts/soak`."""
