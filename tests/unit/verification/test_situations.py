"""Methods x situations: what is put into a program, which programs cover the product, and what is found."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

import mpisgd
from mpisgd.gradients.compression_state import CompressionState
from mpisgd.methods.diloco.quorum.rounds import Rounds
from mpisgd.sharding.piece import Piece
from mpisgd.tools.verification.covering import alone_in, packed, pairs_of
from mpisgd.tools.verification.known_results import KnownResults, OutOfTime
from mpisgd.tools.verification.matrix_page import write_page
from mpisgd.tools.verification.matrix_report import draw_matrix, outcomes, text_of_matrix
from mpisgd.tools.verification.method_matrix import DIVISIONS, Division, Row, Tried, row_of, rows
from mpisgd.tools.verification.programs.compare import Verdict
from mpisgd.tools.verification.programs.contract import violation
from mpisgd.tools.verification.programs.events import Clip, Reload, Step
from mpisgd.tools.verification.programs.execute import has_reference
from mpisgd.tools.verification.programs.program import Optimizer, Program, parse
from mpisgd.tools.verification.programs.threads_backend import ThreadsBackend
from mpisgd.tools.verification.programs.try_out import VARIANTS_EVERY
from mpisgd.tools.verification.programs.variants import same_bits, variants
from mpisgd.tools.verification.refusals import UNKNOWN, text_of_refusals, with_unknown
from mpisgd.tools.verification.run_matrix import Matrix, Results, run_matrix, summary_of_matrix
from mpisgd.tools.verification.sabotage import Sabotage
from mpisgd.tools.verification.situations import SITUATIONS, compose, plain_program

PLAIN = plain_program(Optimizer(), 3, 0, exact=True)
SYNCHRONOUS = Row("Synchronous()", Optimizer("SGD", (("lr", 0.25), ("momentum", 0.5))), exact=True)


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_situation_changes_the_plain_program_into_one_that_may_be(name):
    plain = replace(PLAIN, ranks=4) if name == "in one order" else PLAIN
    changed = compose(plain, [SITUATIONS[name]])
    assert changed is not None
    assert changed != compose(plain, [])
    assert violation(changed) == ""


def test_situations_are_put_on_each_other_in_one_order():
    one, other = SITUATIONS["clipped"], SITUATIONS["resumed"]
    both = compose(PLAIN, [one, other])
    assert both == compose(PLAIN, [other, one])
    kinds = [type(event) for event in both.events]
    assert kinds.count(Clip) == kinds.count(Step) == 5
    assert kinds.count(Reload) == 2  # one after the other


def test_every_pass_has_data_of_its_own():
    names = ("two passes a step", "a backward that fails", "accumulated in no_sync")
    program = compose(PLAIN, [SITUATIONS[name] for name in names])
    data = [event.data for event in program.events if hasattr(event, "data")]
    assert len(data) == 5 * 4 + 1
    assert len({*data}) == len(data)


def fine(program):
    return Verdict("ok")


def test_pairs_cover_all_that_are_allowed():
    singles = list(alone_in(SYNCHRONOUS, 0, fine))
    tried = list(pairs_of(SYNCHRONOUS, singles, 0, fine))
    covered = {pair for each in tried for pair in itertools.combinations(each.situations, 2)}
    allowed = [each.situations[0] for each in singles if each.kind == "ok" and each.situations]
    assert covered >= {*itertools.combinations(allowed, 2)}
    assert len(tried) < 0.4 * len(covered), "several pairs share a program"


def test_a_pair_that_is_refused_is_found_and_others_come_without_it():
    refused = {"clipped", "resumed"}

    def refuses(program):
        kinds = {type(event) for event in program.events}
        return Verdict("refused" if {Clip, Reload} <= kinds else "ok")

    singles = list(alone_in(SYNCHRONOUS, 0, fine))
    tried = list(pairs_of(SYNCHRONOUS, singles, 0, refuses))
    assert all(len(each.situations) == 2 for each in tried if each.kind == "refused")
    assert refused in [{*each.situations} for each in tried if each.kind == "refused"]
    covered = {pair for each in tried for pair in itertools.combinations(each.situations, 2)}
    allowed = [each.situations[0] for each in singles if each.kind == "ok" and each.situations]
    assert covered >= {*itertools.combinations(allowed, 2)}


def test_what_a_program_was_is_known_to_the_next_run(tmp_path):
    path, program = tmp_path / "verify.jsonl", PLAIN
    KnownResults(path).run(program, lambda program: Verdict("refused", "so it is"))
    path.write_text(path.read_text() + '["cut o')
    after = KnownResults(path, ends_at_s=1.0)
    assert after.run(program, lambda program: Verdict("ok")).text == "so it is"
    with pytest.raises(OutOfTime):
        after.run(replace(program, seed=1), lambda program: Verdict("ok"))
    KnownResults(path).run(replace(program, seed=1), lambda program: Verdict("ok"))
    assert len(KnownResults(path)) == 3, "with the line that was cut off"


def test_a_run_that_is_out_of_time_says_so_and_goes_on(tmp_path):
    rows_tried = [SYNCHRONOUS]
    results = Results(tmp_path / "verify.jsonl", ends_at_s=1.0)
    stopped = run_matrix(rows_tried, lambda done, total: None, results=results)
    assert stopped == Matrix([], [SYNCHRONOUS.name])


def test_each_situation_comes_once_in_the_quick_form():
    tried = list(packed(SYNCHRONOUS, 0, fine))
    names = [name for each in tried for name in each.situations]
    assert sorted(names) == sorted(SITUATIONS)
    divisions = {(parse(each.program).ranks, parse(each.program).ranks_per_host) for each in tried}
    assert len(divisions) >= len(DIVISIONS) - 1, "the ranks go round"


def wrong_where_clipped(program):
    return Verdict("values" if any(isinstance(event, Clip) for event in program.events) else "ok")


def test_a_program_that_is_wrong_is_tried_again_in_parts():
    tried = list(packed(SYNCHRONOUS, 0, wrong_where_clipped))
    wrong = {each.situations for each in tried if each.is_fault and len(each.situations) == 1}
    assert wrong == {("clipped",), ("clipped by torch",), ("clipped by value",)}


@pytest.mark.parametrize("division", [each for each in DIVISIONS if each[0] > 1])
@pytest.mark.parametrize("option", [("share_parameters", "True"), ("strategy", "mpisgd.ParameterServer()")])
def test_a_second_optimizer_of_shared_parameters_is_one_error_on_all_ranks(option, division):
    """On 2 + 1 ranks the first two raised, and the third, alone on its host, waited for them."""
    row = Row("shared", Optimizer("SGD", (("lr", 0.25),), (), (option,)), exact=True)
    verdict = ThreadsBackend().run(row.program([SITUATIONS["two optimizers of the same"]], division))
    assert verdict.kind == "refused", verdict
    assert "ranks" in verdict.text
    beside = ThreadsBackend().run(row.program([SITUATIONS["resumed beside the former"]], division))
    assert beside.kind == "ok", beside


@pytest.mark.filterwarnings("ignore:.*failed and nobody waited:RuntimeWarning")
@pytest.mark.parametrize("strategy", ["DiLoCo(sync_every=2)", "LocalSGD(sync_every=2)"])
def test_a_scaler_goes_on_after_a_rank_was_lost_in_its_step(strategy):
    """What it had told the optimizer for the step that failed was multiplied by the scale of the next one."""
    row = next(row for row in rows() if row.name == strategy)
    situations = [SITUATIONS["scaled, with an overflow"], SITUATIONS["a rank is lost"]]
    verdict = ThreadsBackend().run(row.program(situations, (3, 0)))
    assert verdict.kind == "ok", verdict


def large(options: Sequence[tuple[str, str]], *names: str, division: Division = (3, 0)) -> Program:
    """Return a program with more elements than a chunk has."""
    row = Row("", Optimizer("SGD", (("lr", 0.25), ("momentum", 0.5)), (), tuple(options)), exact=False)
    program = row.program([SITUATIONS[name] for name in names], division)
    layers = [replace(each, shape=(90,)) if each.shape == (7,) else each for each in program.layers]
    return replace(program, layers=tuple(layers))


LOCAL = ("strategy", "mpisgd.LocalSGD(sync_every=2)")
FRAGMENTS = ("strategy", "mpisgd.DiLoCo(2, fragments=2)")
BLOCKS = ("compression", "mpisgd.compress.BlockQuantized(bits=8, block=7, error_feedback=True)")


@pytest.mark.parametrize(
    ("options", "situations"),
    [
        ((LOCAL, BLOCKS), ("small buckets", "long")),
        ((LOCAL, BLOCKS), ("long", "a group is added")),
        ((BLOCKS, ("bucket_cap_bytes", "1")), ("long", "a group is added")),
        ((FRAGMENTS, BLOCKS), ("tied", "a group is added")),
        ((LOCAL, ("compression", "mpisgd.compress.RandomK(ratio=0.3)")), ("long", "frozen and thawed")),
    ],
)
def test_what_lies_in_chunks_of_buckets_is_compared_beyond_the_first_chunk(options, situations):
    program = large(options, *situations)
    assert has_reference(program)
    assert ThreadsBackend().run(program).kind == "ok"


@pytest.mark.parametrize("name", ["broadcast", "a rank fewer"])
def test_what_only_the_first_ranks_of_hosts_have_has_no_definition_where_it_is_lost(name):
    options = LOCAL, ("compression", "mpisgd.compress.PerHost(mpisgd.compress.RandomK(ratio=0.3))")
    assert not has_reference(large(options, name, division=(4, 2)))
    assert not has_reference(large(options, name, division=(3, 1)))
    assert has_reference(large(options, division=(4, 2)))


def test_what_is_drawn_in_a_warm_up_has_a_definition_where_each_parameter_has_its_bucket():
    """Else it lies as backward has its gradient: by groups, and by who uses it, in another place."""
    strategy = ("strategy", "mpisgd.LocalSGD(sync_every=2, warmup_steps=2)")
    options = (strategy, ("compression", "mpisgd.compress.RandomK(ratio=0.3)"))
    assert not has_reference(large(options, "two learning rates"))
    assert has_reference(large(options, "two learning rates", "small buckets"))


def test_how_often_an_added_bucket_was_reduced_has_no_definition():
    """The buckets of the others had been reduced before, and the paper counts all reductions alike."""
    options = (LOCAL, ("compression", "mpisgd.compress.RandomK(ratio=0.3)"))
    assert has_reference(large(options, "a group is added"))
    assert not has_reference(large(options, "a group is added", "small buckets"))
    assert has_reference(large(options, "frozen and thawed", "small buckets"))


def test_a_second_optimizer_without_a_paper_is_no_crash():
    """Only the first was asked whether it has one, and then a single rank had a reference."""
    program = large((FRAGMENTS, BLOCKS), "two optimizers, a half each", "fewer elements than ranks")
    assert not has_reference(program)
    assert ThreadsBackend().run(program).kind == "ok"


def test_all_methods_have_a_row():
    names = [row.name for row in rows()]
    assert len({*names}) == len(names)
    kinds = "Synchronous Sharded LocalSGD DiLoCo Gossip ElasticAveraging ParameterServer TopK OneBitAdam"
    assert all(any(kind in name for name in names) for kind in kinds.split())


def test_no_method_is_refused_without_any_situation(capfd):
    """DeepGradient was: it has a momentum, and so had the optimizer of every row."""
    backend = ThreadsBackend()
    kinds = {row.name: backend.run(row.program((), (2, 0))).kind for row in rows()}
    assert {*kinds.values()} == {"ok"}, kinds
    assert capfd.readouterr() == ("", ""), "what gossip tells the user of a job is not for this one"


def test_no_method_loads_what_takes_longer_to_load_than_to_verify():
    """Each process of the matrix would load torch's compiler and its parallelism: seconds, for nothing."""
    program = (
        "import sys\n"
        "from mpisgd.tools.verification.method_matrix import rows\n"
        "from mpisgd.tools.verification.programs.threads_backend import ThreadsBackend\n"
        "run = ThreadsBackend().run\n"
        "print([run(row.program((), (2, 0))).kind for row in rows() if 'DiLoCo' in row.name][:1])\n"
        "print({'torch._dynamo', 'torch.distributed.tensor', 'sympy'} & {*sys.modules})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["['ok']", "set()"], done.stderr


def test_a_row_of_the_users_own_is_a_strategy_or_a_compressor():
    assert row_of("mpisgd:LocalSGD(3)").optimizer.option("strategy") == "mpisgd.LocalSGD(3)"
    assert row_of("mpisgd.compress:TopK(ratio=0.5)").optimizer.option("compression")
    with pytest.raises(mpisgd.InvalidArgument, match="neither a strategy nor a compressor"):
        row_of("mpisgd:ReduceOp.SUM")


@pytest.mark.filterwarnings("ignore:.*failed and nobody waited:RuntimeWarning")
def test_gradients_that_are_averaged_are_right_in_every_situation():
    backend = ThreadsBackend()
    tried = list(packed(SYNCHRONOUS, 3, backend.run))
    assert not [each for each in tried if each.is_fault]
    assert all(each.has_reference for each in tried if each.kind == "ok")
    lines = summary_of_matrix(tried)
    assert len(lines) == 1
    assert lines[0].endswith("0 are wrong")


@pytest.mark.parametrize("sabotage", [each for each in Sabotage if each is not Sabotage.NONE])
def test_what_is_broken_on_purpose_is_found(sabotage):
    program = SYNCHRONOUS.program([SITUATIONS["two learning rates"]], (3, 0))
    assert ThreadsBackend().run(program, sabotage).kind in ("values", "bits")


def test_a_residual_that_is_lost_by_saving_is_found(monkeypatch):
    """A mutation that no situation alone but `resumed` can see."""
    row = next(row for row in rows() if row.name == "compress.TopK(ratio=0.3)")
    plain, resumed = (row.program(each, (2, 0)) for each in ((), (SITUATIONS["resumed"],)))
    backend = ThreadsBackend()
    assert backend.run(resumed).kind == "ok"
    monkeypatch.setattr(CompressionState, "take", lambda self, alike, own: None)
    assert backend.run(plain).kind == "ok"
    assert backend.run(resumed).kind == "values"


@pytest.mark.parametrize("group", ["world", "reversed"])
@pytest.mark.parametrize("apart", ["before", "after"])
def test_ranks_that_start_differently_train_from_the_first_ones_parameters(monkeypatch, apart, group):
    backend, programs = ThreadsBackend(), []
    for row in rows():
        if row.name in ("Synchronous()", "DiLoCo(sync_every=2)", "Sharded()", "ParameterServer()"):
            program = row.program([SITUATIONS["started differently"]], (3, 1))
            programs.append(replace(program, apart=apart, group=group))
    assert len(programs) >= 3
    assert {backend.run(program).kind for program in programs} == {"ok"}
    right = mpisgd.broadcast_parameters
    monkeypatch.setattr(
        mpisgd, "broadcast_parameters", lambda named, src, group: right([*named][:-1], src, group)
    )
    kinds = {backend.run(program).kind for program in programs}
    assert kinds <= {"error CollectiveMismatch", "bits", "values"}, kinds


def learners(weights: str, **options) -> Program:
    row = next(row for row in rows() if row.name == f"DiLoCo with a quorum(weights={weights!r})")
    return replace(row.program((), (3, 0)), **options)


def test_learners_count_by_the_square_of_their_examples(monkeypatch):
    backend, program = ThreadsBackend(), learners("tokens")
    assert has_reference(program)
    assert backend.run(program).kind == "ok"
    monkeypatch.setattr(Rounds, "_shares", lambda self, arrived: [1.0] * len(arrived))
    assert backend.run(program).kind == "values"
    assert backend.run(learners("equal")).kind == "ok"


@pytest.mark.parametrize("weights", ["equal", "tokens"])
def test_learners_are_compared_with_lock_step_or_with_a_quorum_of_one_and_patience(weights):
    program = learners(weights)
    changed = dict(variants(program))["other learners are waited for otherwise"]
    assert changed.optimizers[0].strategy.quorum == (None if weights == "equal" else 1)
    assert ThreadsBackend().run(changed).kind == "ok"
    assert same_bits(program)


def test_a_grace_that_is_over_at_once_is_found(monkeypatch):
    program = learners("tokens", seed=VARIANTS_EVERY)
    backend = ThreadsBackend()
    assert backend.run(program).kind == "ok"
    is_over = Rounds.is_over

    def at_once(self: Rounds, training: set[int], now_s: float) -> bool:
        self._rule = self._rule._replace(grace_s=0.0)
        return is_over(self, training, now_s)

    monkeypatch.setattr(Rounds, "is_over", at_once)
    assert backend.run(program).kind == "variant"


@pytest.mark.parametrize(
    ("method", "broken", "situation"),
    [
        ("with_master", lambda self, entries: entries, "resumed"),
        ("write_back", lambda self: None, "closure"),
        ("without_master", lambda self, entries: {**entries}, "a rank fewer"),
    ],
)
def test_masters_that_are_lost_are_found(monkeypatch, method, broken, situation):
    row = next(row for row in rows() if "with masters" in row.name)
    program = row.program([SITUATIONS[situation]], (3, 0))
    assert has_reference(program)
    assert ThreadsBackend().run(program).kind == "ok"
    monkeypatch.setattr(Piece, method, broken)
    assert ThreadsBackend().run(program).kind == "values"


def test_the_worst_of_a_kind_in_a_situation_is_shown(tmp_path):
    found = [
        Tried("compress.TopK(ratio=0.3)", ("clipped", "resumed"), "ok", has_reference=True),
        Tried("compress.TopK(ratio=0.5)", ("clipped",), "values", "off by 1"),
        Tried("LocalSGD(sync_every=2), compress.TopK(ratio=0.3)", (), "ok"),
        Tried("LocalSGD(sync_every=2)", ("sum",), "refused", "InvalidArgument: op=SUM does not go"),
    ]
    places = outcomes(found)
    assert places["TopK"]["clipped"] == "wrong"
    assert places["TopK"]["resumed"] == "equal"
    assert places["LocalSGD with a compressor"]["plain"] == "alone"
    assert "LocalSGD: sum" in text_of_matrix(found)
    write_page(found, tmp_path / "found.html")
    page = (tmp_path / "found.html").read_text()
    assert page.count("<tr>") == 1 + 4
    assert "<td>TopK</td><td>clipped</td><td class='wrong'>wrong</td><td></td><td>off by 1</td>" in page
    draw_matrix(found, tmp_path / "found.png")
    assert (tmp_path / "found.png").stat().st_size > 1000


def test_all_that_is_broken_on_purpose_is_counted():
    """A run with sabotage says of each program how it was broken; one that broke nothing would be green."""
    tried = run_matrix([SYNCHRONOUS], lambda done, total: None, sabotage=True).found
    assert tried
    assert all(each.sabotage for each in tried)
    assert not [each for each in tried if each.is_fault]
    assert "broken on purpose are found" in summary_of_matrix(tried)[-1]


@pytest.mark.parametrize(
    ("method", "situations", "kind"),
    [
        ("LocalSGD(sync_every=2)", ("sum",), "refused"),
        ("compress.TopK(ratio=0.3)", ("sum",), UNKNOWN),
        ("compress.TopK(ratio=0.3)", (), UNKNOWN),
        ("compress.TopK(ratio=0.3)", ("sum", "overlap"), "refused"),
    ],
)
def test_a_refusal_that_was_not_there_before_is_a_fault(method, situations, kind):
    tried = with_unknown(Tried(method, situations, "refused", "why"))
    assert (tried.kind, tried.text, tried.is_fault) == (kind, "why", kind == UNKNOWN)
    allowed = Tried(method, situations, "ok")
    assert with_unknown(allowed) == allowed


def test_refusals_are_written_as_they_are_read():
    found = [
        Tried("TopK(ratio=0.3)", ("sum",), "refused"),
        Tried("TopK(ratio=0.5)", ("sum",), UNKNOWN),
        Tried("LocalSGD(2)", ("sum",), "refused"),
        Tried("LocalSGD(2)", ("clipped",), "ok"),
        Tried("LocalSGD(2)", ("sum", "clipped"), "refused"),
    ]
    assert text_of_refusals(found) == "sum: LocalSGD | TopK\n"
