"""`python -m mpisgd bench`: how fast collectives and training steps are, beside what else there is.

mpirun -np 2 python -m mpisgd bench collectives --json all.json --plot all.png
mpirun -np 2 python -m mpisgd bench step
mpirun -np 2 python -m mpisgd bench checks
mpirun -np 4 -hostfile hosts python -m mpisgd bench strategies --plot strategies.png
mpirun -np 4 -hostfile hosts python -m mpisgd bench strategies --task text --table text.txt
mpirun -np 4 -hostfile hosts python -m mpisgd bench compression
mpirun -np 2 -hostfile hosts python -m mpisgd bench overlap
mpirun -np 2 python -m mpisgd bench offload --folder /scratch
python -m mpisgd bench scaling --ranks 1,2,4          # these start mpirun themselves
python -m mpisgd bench memory --ranks 2
python -m mpisgd bench layout -- python train.py --epochs 5
"""

import typer

from mpisgd.tools.cli.bench.collectives import collectives
from mpisgd.tools.cli.bench.layout import layout
from mpisgd.tools.cli.bench.memory import memory, offload
from mpisgd.tools.cli.bench.scaling import scaling
from mpisgd.tools.cli.bench.steps import checks, overlap, step
from mpisgd.tools.cli.bench.strategies import compression, strategies
from mpisgd.tools.cli.program import OF_PROGRAM

__all__ = ["bench"]

bench = typer.Typer(add_completion=False, help="Measure collectives and training steps beside their peers.")
for command in (collectives, step, overlap, offload, checks, scaling, memory, strategies, compression):
    bench.command()(command)
bench.command(context_settings=OF_PROGRAM)(layout)
