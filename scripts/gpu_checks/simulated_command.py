"""`python -m mpisgd` on the simulated GPU in the place of CUDA: `python -m gpu_checks.simulated_command`."""

from __future__ import annotations

from gpu_checks.gpu import Gpu
from mpisgd.cli.main import main

if __name__ == "__main__":
    Gpu(simulated=True, quick=True)
    main()
