"""`python -m mpisgd.horovod script.py`: see `mpisgd.horovod.stand_in`."""

import sys

from mpisgd.horovod.stand_in.program import main

main(sys.argv[1:])
