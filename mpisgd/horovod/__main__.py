"""`python -m mpisgd.horovod script.py`: see `mpisgd.horovod.shim`."""

import sys

from mpisgd.horovod.shim.program import main

main(sys.argv[1:])
