"""Random programs as data: drawn alike everywhere, read back from their text, shrunk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fuzzing import draw_changes
from fuzzing.draw import draw
from fuzzing.shrink import shrink

from mpisgd.tools.verification.programs.both_backends import compared
from mpisgd.tools.verification.programs.compare import Outcome, judge
from mpisgd.tools.verification.programs.contract import may_be_refused, violation
from mpisgd.tools.verification.programs.events import (
    Backward,
    Broadcast,
    Clip,
    Convert,
    Reload,
    Step,
    Synchronize,
    ZeroGrad,
)
from mpisgd.tools.verification.programs.execute import Failure, has_reference, references_of, state_digest
from mpisgd.tools.verification.programs.model import numbers
from mpisgd.tools.verification.programs.program import Layer, Optimizer, Program, parse
from mpisgd.tools.verification.programs.python_text import python_text
from mpisgd.tools.verification.programs.variants import all_at_once, same_bits, variants

SEEDS = range(200)
ONE_LAYER = (Layer(),)


def program(*events, ranks=2, layers=ONE_LAYER, **options) -> Program:
    optimizer = Optimizer(layers=tuple(range(len(layers))), options=tuple(options.items()))
    return Program(0, ranks, 0, True, layers, (optimizer,), events)


def test_a_seed_gives_the_same_program_on_every_machine():
    text = "\n".join(repr(draw(seed)) for seed in SEEDS)
    assert text == "\n".join(repr(draw(seed)) for seed in SEEDS)
    assert draw(7, 3, 0) == draw(7, 3, 0)
    assert len({repr(draw(seed)) for seed in SEEDS}) == len(SEEDS)


def test_the_text_of_a_program_is_read_back():
    for seed in SEEDS:
        assert parse(repr(draw(seed))) == draw(seed)


def test_what_is_drawn_keeps_to_the_contract():
    assert not any(violation(draw(seed)) for seed in SEEDS)


def test_chunks_are_drawn_and_other_programs_are_what_they_were(monkeypatch):
    drawn = [repr(draw(seed)) for seed in range(1000)]
    by_chunks = {name: [text for text in drawn if name in text] for name in ("ChunkTopK", "SparseLoCo")}
    assert all(len(texts) >= 3 for texts in by_chunks.values()), by_chunks
    monkeypatch.setattr(draw_changes, "CHUNKS_SHARE", -1.0)
    before = [repr(draw(seed)) for seed in range(1000)]
    assert not any(name in text for name in by_chunks for text in before)
    changed = [now for now, then in zip(drawn, before, strict=True) if now != then]
    assert changed == [text for text in drawn if any(name in text for name in by_chunks)]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_most_programs_have_a_reference_that_runs():
    programs = [draw(seed) for seed in SEEDS[:50] if has_reference(draw(seed))]
    assert len(programs) > 25
    assert [each.seed for each in programs if references_of(each)[0].failure] == []


@pytest.mark.parametrize(
    ("events", "rule"),
    [
        ([Synchronize(), Backward((1,), skipped=(0,))], "is not told"),
        ([Backward((1,), skipped=(0,)), Backward((2,))], "some ranks only"),
        ([Backward((1,), skipped=(0,)), ZeroGrad()], "take part"),
        ([Backward((1,), no_sync=True), Clip(1.0, float("inf"), by_torch=True)], "not reduced"),
        ([Backward((1,)), Clip(1.0)], "rounded"),
        ([Backward((1,), skipped=(5,))], "no such rank"),
        ([Backward((1,), skipped=(0, 1))], "nobody"),
        ([Reload(ranks=1), Backward((1,), skipped=(0,))], "nobody"),
        ([Reload(ranks=2)], "no other ranks"),
        ([Backward((1,), skipped=(0,)), Broadcast()], "within a window"),
        ([Backward((1,), overflow=(0,))], "infinite"),
        ([Backward((1,)), Step(closure=(2,))], "closure"),
        ([Convert(0, channels_last=True)], "images"),
    ],
)
def test_what_a_program_must_not_do_is_named(events, rule):
    assert rule in violation(program(*events))


def test_a_refusal_is_expected_where_reduced_gradients_are_added_to():
    twice = [Backward((1,)), Backward((2,)), Step()]
    assert not may_be_refused(program(*twice))
    assert may_be_refused(program(*twice, op="mpisgd.ReduceOp.SUM"))
    assert not may_be_refused(program(Backward((1,)), ZeroGrad(), *twice[1:], op="mpisgd.ReduceOp.SUM"))


def test_shrinking_keeps_what_fails_and_no_more():
    layers = (Layer(), Layer(shape=(129,), used_by="first"), Layer(kind="embedding", shape=(5, 2)))
    events = [
        ZeroGrad(),
        Backward((1,)),
        Step(),
        Reload(),
        Backward((2,), no_sync=True),
        Backward((3,)),
        Step(),
    ]
    big = program(*events, ranks=3, layers=layers, bucket_cap_bytes="64", overlap="True")

    def kind(each: Program) -> str:
        reloads = any(isinstance(event, Reload) for event in each.events)
        return "values" if reloads and each.optimizers[0].option("overlap") else "ok"

    small = shrink(big, "values", kind, max_runs=500)
    assert small.events == (Reload(),)
    assert small.optimizers[0].options == (("overlap", "True"),)
    assert small.layers == (Layer(shape=(1,)),)
    assert small.ranks == 1


def test_numbers_that_are_no_integers_have_no_equals():
    """Of equals a method that takes the largest takes whichever it likes, and ends elsewhere."""
    for key in (653, 684, 715):
        assert numbers((70_000,), key, exact=False).abs().unique().numel() == 70_000


def test_matrices_have_full_rank():
    """In others a method of low rank keeps noise, and ends elsewhere with each order of additions."""
    for shape in ((2, 5), (40, 33)):
        for key in (653, 684, 715):
            values = torch.linalg.svdvals(numbers(shape, key, exact=False))
            assert values.min() > 0.01 * values.max()


def test_the_python_text_is_python():
    for seed in SEEDS:
        compile(python_text(draw(seed)), "program", "exec")


def test_variants_are_other_programs_that_say_the_same():
    resumed = program(Backward((1,), no_sync=True), Backward((2,)), Step(), Reload(), Backward((3,)), Step())
    found = dict(variants(resumed))
    assert found["joined"].events[0] == Backward((1, 2))
    assert not any(isinstance(event, Reload) for event in found["not interrupted"].events)
    name, together = all_at_once(resumed)
    assert name == "not interrupted, renamed, joined"
    assert together.events == (Backward((1, 2)), Step(), ZeroGrad(), Backward((3,)), Step())
    assert together.optimizers == found["renamed"].optimizers


def test_the_verdict_is_that_of_all_ranks():
    fine, other = Outcome(((0, "a"),)), Outcome(((0, "b"),))
    assert judge([fine, fine], ranks_agree=True).kind == "ok"
    assert judge([fine, other], ranks_agree=True).kind == "bits"
    assert judge([fine, other], ranks_agree=False).kind == "ok"
    refused = Outcome((), failure=Failure(-1, "InvalidArgument", "no"))
    assert judge([refused, refused], ranks_agree=True).kind == "refused"
    assert judge([refused, fine], ranks_agree=True).kind == "error InvalidArgument"
    later = Outcome((), failure=Failure(2, "InvalidArgument", "no"))
    assert judge([later, later], ranks_agree=True, may_be_refused=True).kind == "refused"
    assert judge([later, later], ranks_agree=True, may_be_refused=False).kind == "error InvalidArgument"
    waits = Outcome((), failure=Failure(2, "CollectiveTimeout", "waits"))
    assert not judge([refused, waits], ranks_agree=True).is_healthy


def test_both_backends_are_to_give_the_same_bits():
    outcomes = [Outcome(((0, "a"), (1, "b")), "s"), Outcome(((0, "a"), (1, "c")), "t")]
    verdict = judge(outcomes, ranks_agree=False)
    assert compared(verdict, verdict).kind == "ok"
    other = judge([outcomes[0], Outcome(((0, "a"), (1, "d")), "t")], ranks_agree=False)
    assert "rank 1: other bits after event 1" in compared(verdict, other).text
    other = judge([replace(outcomes[0], state_bits="u"), outcomes[1]], ranks_agree=False)
    assert "rank 0: other bits in the states" in compared(verdict, other).text
    refused = judge([Outcome((), failure=Failure(-1, "InvalidArgument", "no"))] * 2, ranks_agree=False)
    assert compared(verdict, refused).kind == "backends"


def test_a_hash_of_states_tells_every_bit_of_them():
    def state(value):
        return [{"state": {0: {"step": 1, "entries": [value]}}, "mpisgd": {"own": {"residual": None}}}]

    zeros = torch.zeros(3)
    assert state_digest(state(zeros)) == state_digest(state(zeros.clone()))
    others = [state(-zeros), state(zeros.double()), state(zeros.view(3, 1)), state(None), state((0, 0, 0))]
    assert len({state_digest(each) for each in [state(zeros), *others]}) == 6


def test_norms_of_pieces_are_summed_in_another_order_after_a_reload():
    clipped = replace(program(Backward((1,)), Clip(1.0), Step(), strategy="mpisgd.Sharded()"), exact=False)
    assert not same_bits(clipped)
    assert same_bits(replace(clipped, exact=True))
    assert same_bits(replace(clipped, events=(Backward((1,)), Step())))


def test_a_scaler_sees_reduced_gradients_once():
    def scaled(*events, **options):
        return violation(replace(program(*events, **options), scaler=True))

    assert not scaled(
        Backward((1,), overflow=(1,)), Step(), ZeroGrad(), Backward((2,)), Clip(1.0, float("inf"))
    )
    assert "reduced" in scaled(Backward((1,), skipped=(0,)), Step())
    assert "to divide" in scaled(Backward((1,)), Step(), Step())
    assert "added to" in scaled(Backward((1,)), Step(), Backward((2,)))
    assert "finite" in scaled(Backward((1,)), Step(), error_if_nonfinite="True")
    local = [Backward((1,), skipped=(0,)), Synchronize(), Step()]
    assert "without gradients" in scaled(*local, strategy="mpisgd.LocalSGD(sync_every=2)")


def test_ranks_that_take_no_part_are_not_compared():
    trains, waits = Outcome(((0, "a"), (1, "b"))), Outcome(((0, "a"),))
    assert judge([trains, waits], ranks_agree=True).kind == "ok"
    assert judge([trains, replace(waits, bits=((0, "c"),))], ranks_agree=True).kind == "bits"


def test_what_is_the_ranks_own_may_be_left_out_where_their_number_changes():
    resized = program(Backward((1,)), Step(), Reload(), Reload(ranks=1), Backward((2,)), Step())
    found = dict(variants(resized))
    assert found["forgotten"].events[3] == Reload(ranks=1, forgets=True)
    assert found["not interrupted"].events[2:4] == (ZeroGrad(), Reload(ranks=1))


def test_codes_between_hosts_are_drawn_where_there_are_some():
    coded = [program for program in map(draw, range(600)) if "gradients=" in repr(program)]
    assert len(coded) > 5
    assert all(0 < program.ranks_per_host < program.ranks for program in coded)
    assert sum(map(has_reference, coded)) > len(coded) / 3


@pytest.mark.parametrize(
    ("module_share", "asks"), [("MASTERS_SHARE", "master_dtype="), ("FILES_SHARE", "Offload(")]
)
def test_what_is_asked_of_sharded_is_drawn_and_other_programs_are_what_they_were(
    monkeypatch, module_share, asks
):
    drawn = [draw(seed) for seed in range(1000)]
    asked = [p for p in drawn if asks in repr(p) and p.optimizers[0].name != "Extragradient"]  # see below
    assert len(asked) > 20
    assert sum(map(has_reference, asked)) > len(asked) / 2
    monkeypatch.setattr(draw_changes, module_share, -1.0)
    before = [draw(seed) for seed in range(1000)]
    assert [now for now, then in zip(drawn, before, strict=True) if now != then] == asked


def test_closures_that_are_called_twice_are_drawn_with_masters_too_and_other_programs_are_what_they_were(
    monkeypatch,
):
    drawn = [draw(seed) for seed in range(1000)]
    twice = [program for program in drawn if program.optimizers[0].name == "Extragradient"]
    assert len(twice) > 20
    assert any("master_dtype=" in repr(program) for program in twice)
    assert sum(map(has_reference, twice)) > len(twice) / 2
    monkeypatch.setitem(draw.__globals__, "with_closures", lambda program, chance: program)
    before = [draw(seed) for seed in range(1000)]
    assert [now for now, then in zip(drawn, before, strict=True) if now != then] == twice
