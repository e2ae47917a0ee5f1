"""`python -m mpisgd`: see `mpisgd.tools.cli`."""

from mpisgd.tools.cli.main import main

main()
