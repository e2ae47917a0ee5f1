"""What goes with what: the page says what the declarations say, and a pair that they allow is made."""

from __future__ import annotations

import goes_with_tables
import pytest
import torch

import mpisgd
from mpisgd.job.threads_as_ranks import run_ranks
from mpisgd.methods import catalogue
from mpisgd.methods.strategy.goes_with import OPTIONS, SITUATIONS, GoesWith

STRATEGIES = [example for kind in catalogue.strategies() for example in kind.examples()]
COMPRESSORS = [example for kind in catalogue.compressors() for example in kind.examples()]
ALLOWED = list(catalogue.examples_that_go_together())
# What a user writes for each option that some strategy refuses.
CHOSEN = {
    "op": {"op": "sum"},
    "adaptive_sum": {"op": mpisgd.Adasum},
    "reproducible": {"reproducible": "ranks"},
    "gradient_predivide_factor": {"gradient_predivide_factor": 2.0},
    "error_if_nonfinite": {"error_if_nonfinite": True},
    "check_in_sync_every": {"check_in_sync_every": 2},
    "share_parameters": {"share_parameters": True},
    "named_buffers": {"named_buffers": [("mean", torch.ones(1))]},
    "whole_gradients": {},
}


def refusals(
    strategy: mpisgd.Strategy, *choices: dict, kind: type[torch.optim.Optimizer] = torch.optim.SGD
) -> list[str]:
    """What construction says with each choice of options, "" if it goes."""

    def wrap(given: dict) -> str:
        model = torch.nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=0.1)
        try:
            mpisgd.DistributedOptimizer(optimizer, model.named_parameters(), strategy=strategy, **given)
        except mpisgd.InvalidArgument as error:
            return str(error)
        return ""

    one, other = run_ranks(2, lambda: list(map(wrap, choices)))
    assert one == other
    return one


def _needs_compression(strategy: mpisgd.Strategy) -> bool:
    return getattr(strategy, "consensus_step", None) is not None


def test_the_page_has_the_tables_of_today():
    text = goes_with_tables.PAGE.read_text()
    assert goes_with_tables.with_tables(text) == text, "run scripts/docs_site/goes_with_tables.py --write"


def test_every_answer_has_a_row():
    of_answers = {name for name in GoesWith.__dataclass_fields__ if name not in ("of", "compression")}
    assert of_answers == {*OPTIONS, *SITUATIONS}
    assert CHOSEN.keys() == OPTIONS.keys()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize("option", OPTIONS)
def test_what_is_declared_is_what_construction_does(strategy, option):
    kind = torch.optim.LBFGS if option == "whole_gradients" else torch.optim.SGD
    given = {"compression": mpisgd.compress.TopK(0.5)} if _needs_compression(strategy) else {}
    answer, (said,) = strategy.goes_with.answer(option), refusals(strategy, given | CHOSEN[option], kind=kind)
    without_compression = option in ("adaptive_sum", "reproducible")
    if answer.goes or (without_compression and _needs_compression(strategy)):
        assert answer.goes == (not said), said
    else:
        assert f"does not go with {strategy}" in said
        assert answer.words in said


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_compressors_go_as_is_declared(strategy):
    allowed = [compressor for each, compressor in ALLOWED if each == strategy]
    found = refusals(strategy, *({"compression": compressor} for compressor in COMPRESSORS))
    for compressor, said in zip(COMPRESSORS, found, strict=True):
        assert (compressor in allowed) == (not said), (compressor, said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"op": mpisgd.Adasum, "share_parameters": True}, "op=Adasum does not go with share_parameters=True"),
        ({"op": mpisgd.Adasum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor=2.0"),
        ({"share_parameters": True, "optimizer": torch.optim.LBFGS}, "optimizer=LBFGS"),
    ],
)
def test_options_that_exclude_each_other(options, said):
    def wrap() -> str:
        params = [torch.nn.Parameter(torch.ones(4))]
        kind = options.get("optimizer", torch.optim.SGD)
        given = {name: value for name, value in options.items() if name != "optimizer"}
        with pytest.raises(mpisgd.InvalidArgument) as caught:
            mpisgd.DistributedOptimizer(kind(params, lr=0.1), **given)
        return str(caught.value)

    assert all(said in text for text in run_ranks(2, wrap))
