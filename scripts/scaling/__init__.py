"""How a job grows with its ranks and hosts, measured: the program behind `./scripts/scale`."""
