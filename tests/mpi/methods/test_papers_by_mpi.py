"""What tests/unit/methods finds on ranks that are threads holds under MPI: a method of each kind."""

from __future__ import annotations

import pytest
from paper_programs import CLOSE, Program, by_paper, definition_of, momentum, trained_here
from verdicts import everyone

import mpisgd
from mpisgd import DiLoCo, ElasticAveraging, Gossip, LocalSGD, compress

METHODS = [
    {"compression": compress.TopK(0.2)},
    {"compression": compress.PowerSGD(1)},
    {"compression": compress.OneBit(two_step=True)},
    {"compression": compress.QSGD(4, segment=10)},
    {"compression": compress.RandomK(0.25)},
    {"op": mpisgd.Adasum},
    {"strategy": LocalSGD(2, warmup_steps=2), "compression": compress.TopK(0.2)},
    {"strategy": DiLoCo(3, fragments=2, overlap_steps=1)},
    {"strategy": ElasticAveraging(every=2)},
    {"strategy": Gossip("exponential")},
    {"strategy": Gossip("ring", consensus_step=0.3), "compression": compress.TopK(0.2)},
]


@pytest.mark.parametrize("options", METHODS, ids=repr)
def test_a_method_is_its_paper(options):
    program = Program(size=mpisgd.size(), dyadic=False, make=momentum)
    mine = trained_here(
        program,
        lambda params: mpisgd.DistributedOptimizer(
            program.make(list(params.values())), params.items(), **options
        ),
    )
    expected = by_paper(program, definition_of(program, **options))[mpisgd.rank()]
    for step, (have, want) in enumerate(zip(mine, expected, strict=True)):
        apart = max(float((have[name] - want[name]).abs().max() / want[name].abs().max()) for name in want)
        everyone(apart <= CLOSE, f"step {step}: {apart:.1e}")
