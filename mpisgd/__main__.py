"""`python -m mpisgd`: see `mpisgd.cli`."""

from mpisgd.cli.main import main

main()
