"""`python -m mpisgd` on the simulated GPU in the place of CUDA: `python -m gpu_checks.simulated_command`."""

from gpu_checks.gpu import Gpu, end_simulation
from mpisgd.tools.cli.main import main

if __name__ == "__main__":
    Gpu(simulated=True, quick=True)
    try:
        main()
    except SystemExit as exc:
        end_simulation(int(exc.code or 0))
    end_simulation(0)
