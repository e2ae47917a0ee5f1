"""Tensor and pipeline parallelism: a case computed by hand, and the formulas of the papers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mpisgd.errors import InvalidArgument
from mpisgd.tools.plan.advice import code_line, command_line, equals_one_process
from mpisgd.tools.plan.cluster import Cluster, Link
from mpisgd.tools.plan.files import read_step, write_step
from mpisgd.tools.plan.methods import layouts_of, planned_methods
from mpisgd.tools.plan.models.blocks import Block
from mpisgd.tools.plan.models.count_model import bench_model, count
from mpisgd.tools.plan.models.gpt import gpt, gpt_from_text
from mpisgd.tools.plan.models.model import Gradient, StepProfile, blocks_of, profile_of
from mpisgd.tools.plan.prediction import predict, predict_all
from mpisgd.tools.plan.steps.parallel import Grid, Parallel

ALPHA, RATE = 0.01, 1e3
OUTPUT = 80.0  # bytes of a block's output, of a rank's batch


def blocks(number, all_reduces=0, **options):
    """Blocks of one matrix of 8 x 10 and a vector of 5, one second forward and two backward."""
    fields = {"output_bytes": OUTPUT, "activation_bytes": 1000.0, **options}
    one = Block("block", ((8, 10), (5,)), 1.0, 2.0, all_reduces=all_reduces, **fields)
    return tuple(replace(one, name=f"block {place}") for place in range(number))


def step(number=2, all_reduces=0, batch=8, optimizer_s=0.0, **options):
    made = blocks(number, all_reduces, **options)
    shapes = [shape for block in made for shape in block.shapes]
    gradients = tuple(
        Gradient(f"p{place}", place, shape, 4, 3.0 * number)
        for place, shape in reversed(list(enumerate(shapes)))
    )
    return StepProfile(
        "example", batch, 1.0 * number, 2.0 * number, optimizer_s, gradients, "adamw", 0.0, made
    )


def hosts(number=2, **options):
    """One rank on each, and links that count."""
    return Cluster(number, 1, Link(ALPHA, RATE), Link(1e-9, 1e15), memory_bytes_per_s=1e15, **options)


def quick(ranks, **options):
    """Links that take nothing."""
    link = Link(1e-12, 1e18)
    return Cluster(1, ranks, link, link, memory_bytes_per_s=1e18, **options)


def planned(text, where, profile):
    return predict(where, profile, planned_methods(text)[0])


# -- a pipeline ----------------------------------------------------------------------------------------


def test_two_stages_and_two_micro_batches_by_hand():
    """A micro-batch is half of the 16 examples: one second forward, two backward, 80 bytes of output.

    stage 0  F0 F1 . . . .  .  B0 B0 . B1 B1        F of stage 1 begins a message later
    stage 1  .  F0 B0 B0 F1 B1 B1                    1F1B: F0 B0 F1 B1
    """
    found = planned("Parallel(pp=2, micro_batches=2)", hosts(), step())
    message = ALPHA + OUTPUT / RATE
    # Stage 1 works from 1 + message on without a break, 6 seconds; its last gradient goes back.
    assert found.step_s == pytest.approx(1 + message + 6 + message + 2)
    assert found.step.traffic == {"host out": 2 * OUTPUT, "host in": 2 * OUTPUT}
    assert found.step.sent_bytes == 2 * OUTPUT  # of each rank: two activations, or two gradients
    assert found.step.waiting_s == pytest.approx(found.step_s - 6)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 16)])
def test_the_bubble_is_that_of_the_papers(schedule, stages, micro_batches):
    """(p - 1) / (m + p - 1) of the time of all ranks, with equal stages (Huang and others 2019)."""
    method = f"Parallel(pp={stages}, micro_batches={micro_batches}, schedule={schedule!r})"
    found = planned(method, quick(stages), step(stages, batch=micro_batches))
    share = (stages - 1) / (micro_batches + stages - 1)
    assert found.step.waiting_s / found.step_s == pytest.approx(share)
    assert found.step_s == pytest.approx(3 * stages / (1 - share))


def test_interleaved_stages_divide_the_bubble():
    """(p - 1) / v m of the ideal time, with v stages for each rank (Narayanan and others 2021)."""
    method = "Parallel(pp=4, micro_batches=8, schedule='interleaved', stages_per_rank=2)"
    found = planned(method, quick(4), step(8))
    assert found.step_s == pytest.approx(24 * (1 + 3 / (2 * 8)))


def test_activations_that_are_kept():
    """GPipe: those of all m micro-batches; 1F1B: of at most p of them (Narayanan and others 2021)."""
    found = {
        name: planned(
            f"Parallel(pp=4, micro_batches=16, schedule={name!r})", quick(4), step(4, batch=16)
        ).memory
        for name in ("gpipe", "1f1b")
    }
    message = OUTPUT * 4 / 16  # of a micro-batch
    micro_batch = 1000.0 * 4 / 16 + message  # of one block, and what it has sent
    kept = {name: memory.activations for name, memory in found.items()}
    assert kept == {"gpipe": 16 * micro_batch, "1f1b": 4 * micro_batch}
    # Behind the last forward pass the receives of all four gradients that are left are started.
    assert found["1f1b"].buffers == 4 * message


def test_recomputation_keeps_the_ends_of_stages_and_computes_forward_twice():
    method = "Parallel(pp=2, micro_batches=4, schedule='gpipe', recompute=True)"
    found = planned(method, quick(2), step(4, batch=4))
    share = 2 / 4  # a micro-batch, of a rank's batch
    assert found.memory.activations == 4 * OUTPUT * share + 2 * 1000.0 * share  # and one computed again
    assert found.memory.buffers == 4 * OUTPUT * share  # gradients that come
    assert found.step_s == pytest.approx((4 + 1) * 2 * (1 + 3) * share)


def test_replicas_of_stages_mean_their_gradients():
    """Two pipelines of two stages, one rank on each host: one all-reduce of the stage's parameters."""
    whole = planned("Parallel(pp=2, micro_batches=2)", hosts(4), step(batch=8))
    alone = planned("Parallel(pp=2, micro_batches=2)", hosts(2), step(batch=8))
    nbytes = 85 * 4
    mean_s = ALPHA + 2 * (ALPHA + nbytes / 2 / RATE)  # the check, and two rounds
    assert whole.step_s - alone.step_s == pytest.approx(mean_s)
    assert whole.step.sent_bytes == 2 * OUTPUT + nbytes


def test_traffic_of_a_pipeline_within_a_host_is_that_of_the_busiest_rank():
    """The middle one of three or more sends activations on, and gradients back."""
    link = Link(1e-12, 1e18)
    where = Cluster(1, 4, link, link, within_is_shared=False, memory_bytes_per_s=1e18)
    found = planned("Parallel(pp=4, micro_batches=4)", where, step(4))
    assert found.step.traffic == {"rank out": 2 * 4 * OUTPUT, "rank in": 2 * 4 * OUTPUT}


def test_each_rank_of_a_pipeline_has_its_share_of_the_parameters():
    found = planned("Parallel(pp=2)", quick(2), step(2)).memory
    assert (found.parameters, found.gradients, found.optimizer) == (85 * 4, 85 * 4, 2 * 85 * 4)


# -- tensor parallelism --------------------------------------------------------------------------------


def test_tensor_parallelism_by_hand():
    """Two all-reduces forward and two backward, in each block, of the activations of both ranks' examples."""
    found = planned("Parallel(tp=2)", hosts(), step(3, all_reduces=2))
    nbytes = 2 * OUTPUT
    sum_s = ALPHA + 2 * (ALPHA + nbytes / 2 / RATE)
    assert found.step_s == pytest.approx(9 + 3 * 4 * sum_s)
    assert found.step.sent_bytes == 3 * 4 * nbytes
    assert found.step.traffic["host out"] == 3 * 4 * nbytes
    assert found.memory.parameters == 3 * (40 + 5) * 4  # matrices are divided, vectors are not


def test_what_a_pass_takes_whatever_its_size():
    """Of three seconds one is fixed: micro-batches take it each, and so do the parts of divided blocks."""
    profile = step(2, all_reduces=2, fixed_s=1.0, divided_s=0.5)
    pipeline = planned("Parallel(pp=2, micro_batches=8)", quick(2), profile)
    micro_batch_s = 1 + 2 * 2 / 8
    assert pipeline.step_s == pytest.approx((8 + 1) * micro_batch_s)
    tensor = planned("Parallel(tp=2)", quick(2), profile)
    assert tensor.step_s == pytest.approx(2 * (1 + 0.5 + 2 * 2 / 2))


def test_blocks_without_all_reduces_are_computed_by_all_ranks():
    one, other = blocks(1, all_reduces=2), blocks(1)
    profile = replace(step(2), blocks=(*one, replace(other[0], name="head")))
    found = planned("Parallel(tp=2)", quick(2), profile)
    assert found.step_s == pytest.approx(3 + 2 * 3)  # of 16 examples: half of the first, all of the second


def test_a_grid_gives_groups_what_they_share():
    """Two hosts of four ranks: pairs share memory, and two of them the link of the host."""
    where = Cluster(2, 4, Link(1e-6, 100.0), Link(1e-6, 1000.0))
    grid = Grid(where, tp=2, pp=1)
    assert (grid.replicas, grid.tensor_group.size, grid.data_group.size) == (4, 2, 4)
    assert grid.tensor_group.within.bytes_per_s == 1000.0 / 2
    assert (grid.data_group.hosts, grid.data_group.between.bytes_per_s) == (2, 100.0 / 2)


def test_activations_of_megatron():
    """Korthikanti and others 2022, without dropout: 8 s b h bytes stay whole, the rest is divided by t."""
    kept = gpt(layers=1, heads=8, dim=64, context=32, itemsize=2).layers[1]
    (block,) = [each for each in blocks_of_gpt() if each.name == "block 0"]
    state = 32 * 64 * 2
    assert block.activations_of(4) == pytest.approx(4 * state + (kept.activation_bytes - 4 * state) / 4)


def blocks_of_gpt():
    return profile_of(gpt(1, 8, 64, 32, itemsize=2), quick(1, flops_per_s=1e12), 1).blocks


def test_parameters_in_files_are_read_and_written_layer_by_layer():
    """AdamW, float32: 16 bytes of each parameter are kept, and 40 read and written in a step."""
    profile, rate = step(4), 100.0
    numel = profile.numel
    method = "Sharded(offload=Offload('/scratch', what='optimizer,parameters', block_bytes=4096))"
    for ranks in (1, 2):
        found = planned(method, quick(ranks, disk_bytes_per_s=rate), profile)
        assert found.step_s == pytest.approx(12 + 40 * numel / ranks / rate)
        assert found.step.sent_bytes == pytest.approx(3 * (ranks - 1) / ranks * 4 * numel)
        assert found.memory.parameters == found.memory.gradients == found.memory.buffers == 4 * numel / 4
    with pytest.raises(InvalidArgument, match="without the layers"):
        planned(method, quick(2, disk_bytes_per_s=rate), replace(profile, blocks=()))


# -- context parallelism -------------------------------------------------------------------------------

KEYS = 40.0  # bytes of a block's keys and values, of a rank's batch


def test_context_parallelism_by_hand():
    """Keys pass the other ranks forward, keys and gradients backward; a third of each pass hides them."""
    found = planned("Parallel(cp=3)", hosts(3), step(2, key_bytes=KEYS, attention=0.3))
    message_s, check_s = ALPHA + KEYS / RATE, ALPHA
    alone = planned("Synchronous", hosts(3), step(2))
    assert message_s < 0.3 / 3 * 1.0  # hidden behind a rank's own attention, and two behind backward's
    assert found.step_s - alone.step_s == pytest.approx(2 * 2 * check_s)
    ring = 2 * 3 * 2 * KEYS  # two blocks, three parts, to two others
    assert found.step.sent_bytes - alone.step.sent_bytes == pytest.approx(ring)
    assert found.step.traffic["host out"] - alone.step.traffic["host out"] == pytest.approx(ring)


def test_what_attention_does_not_hide_takes_time():
    slow, keys = hosts(2), 1000.0
    hidden = planned("Parallel(cp=2)", slow, step(2, key_bytes=keys, attention=1.0))
    exposed = planned("Parallel(cp=2)", slow, step(2, key_bytes=keys))
    message_s = ALPHA + keys / RATE
    forward_s, backward_s = max(0.0, message_s - 0.5), max(0.0, 2 * message_s - 1.0)
    assert exposed.step_s - hidden.step_s == pytest.approx(2 * (3 * message_s - forward_s - backward_s))


def test_a_ring_in_micro_batches_keeps_a_part_of_the_activations():
    """Four ranks: one sequence after another, a quarter each; and two messages, and two of gradients."""
    profile = step(2, batch=1, key_bytes=KEYS)
    whole = planned("Parallel(cp=4)", quick(4), profile).memory
    parts = planned("Parallel(cp=4, micro_batches=4)", quick(4), profile).memory
    assert (whole.activations, parts.activations) == (2 * 1000.0, 2 * 1000.0 / 4)
    assert (whole.buffers, parts.buffers) == (4 * KEYS, 4 * KEYS / 4)
    assert whole.parameters == parts.parameters == 2 * 85 * 4


def test_gradients_are_averaged_over_rings_and_parts():
    """Four ranks on two hosts: rings on a host, and an all-reduce of all."""
    where = Cluster(2, 2, Link(ALPHA, RATE), Link(1e-9, 1e15), memory_bytes_per_s=1e15)
    found = planned("Parallel(cp=2)", where, step(2, key_bytes=KEYS))
    alone = planned("Synchronous", where, step(2))
    assert found.step.traffic["host out"] == alone.step.traffic["host out"]
    grid = Grid(where, tp=1, pp=1, cp=2)
    assert (grid.replicas, grid.context_group.size, grid.context_group.hosts) == (4, 2, 1)


def test_context_parallelism_of_what_is_not_known_is_refused():
    with pytest.raises(InvalidArgument, match="keys"):
        planned("Parallel(cp=2)", quick(2), step(2))
    with pytest.raises(InvalidArgument, match="beside dp and tp alone"):
        Parallel(cp=2, pp=2)
    with pytest.raises(InvalidArgument, match="tp x cp x pp = 4"):
        planned("Parallel(cp=2, tp=2)", quick(6), step(2, all_reduces=2, key_bytes=KEYS))


# -- three axes ----------------------------------------------------------------------------------------


def test_all_three_axes_divide_the_work():
    """Without links: 8 ranks are as fast as one on an eighth, but for the bubble."""
    profile = step(4, all_reduces=2)
    found = planned("Parallel(tp=2, pp=2, micro_batches=4)", quick(8), profile)
    assert found.step_s == pytest.approx(12 * (1 + 1 / 4), rel=1e-6)
    assert found.examples_per_s == pytest.approx(8 * 8 / 15, rel=1e-6)


def test_layouts_are_planned_beside_the_methods():
    where = quick(8, flops_per_s=1e12)
    profile = profile_of(gpt(), where, 4)
    found, left_out = predict_all([where], profile, planned_methods("Synchronous"), layouts=True)
    names = {each.method for each in found}
    assert {
        "Synchronous",
        "Parallel(tp=8)",
        "Parallel(tp=2, pp=4)",
        "Parallel(pp=4, schedule='gpipe')",
    } <= names
    assert not left_out


def test_what_does_not_fit_is_computed_again():
    where = quick(4, flops_per_s=1e12, memory_bytes=1e8)
    profile = profile_of(gpt(), where, 64)
    found, _ = predict_all([where], profile, [], layouts=True)
    assert any("recompute=True" in each.method for each in found)


def test_a_model_without_known_blocks_has_no_layouts():
    profile = replace(step(), blocks=())
    assert layouts_of(quick(4), profile) == []
    with pytest.raises(InvalidArgument, match="blocks"):
        planned("Parallel(pp=2)", quick(4), profile)


@pytest.mark.parametrize(
    ("text", "ranks", "words"),
    [
        ("Parallel(pp=3)", 4, "multiple of tp x pp = 3"),
        ("Parallel(pp=4)", 4, "4 stages of 2 blocks"),
        ("Parallel(tp=2)", 4, "no block"),
        ("Parallel(pp=2, micro_batches=5)", 4, "micro_batches=5"),
        ("Parallel(pp=2) + bf16", 4, "compression"),
    ],
)
def test_what_cannot_be_divided_is_refused(text, ranks, words):
    with pytest.raises(InvalidArgument, match=words):
        planned(text, quick(ranks), step())


def test_ranks_of_a_stage_that_would_share_a_host_with_others_are_refused():
    where = Cluster(3, 4, Link(ALPHA, RATE), Link(ALPHA, RATE))
    with pytest.raises(InvalidArgument, match="in part"):
        planned("Parallel(pp=2)", where, step())


@pytest.mark.parametrize("options", [{"tp": 0}, {"pp": 1.5}, {"schedule": "pipedream"}, {"schedule": "x"}])
def test_a_layout_that_is_none_is_refused(options):
    with pytest.raises(InvalidArgument):
        Parallel(**options)


def test_a_layout_prints_as_it_is_written():
    layout = Parallel(tp=2, pp=4, schedule="gpipe", recompute=True)
    (method,) = planned_methods(layout.text)
    assert method.strategy == layout
    assert equals_one_process(method)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Parallel(pp=2)", "--pipeline 1f1b --parallel dp=4,pp=2 --accumulate 8"),
        ("Parallel(tp=2)", "--parallel dp=4,tp=2"),
        ("Parallel(cp=2, tp=2, micro_batches=2)", "--parallel dp=2,cp=2,tp=2 --accumulate 2"),
        ("Parallel(tp=2, pp=2)", "--parallel dp=2,tp=2,pp=2 --accumulate 8"),
    ],
)
def test_the_command_that_runs_a_layout(text, expected):
    where = quick(8, flops_per_s=1e12)
    (method,) = planned_methods(text)
    found = predict(where, profile_of(gpt(), where, 4), method)
    sizes = "--layers 4 --heads 4 --dim 128 --context 128 --batch-size 32"
    assert (
        command_line(found, method) == f"python -m mpisgd run -n 8 scripts/train_text.py {expected} {sizes}"
    )
    calls = ("mpisgd.pipeline.Pipeline(", "torch.distributed.tensor.parallel", "mpisgd.context_parallel(")
    assert code_line(method).startswith(calls)


# -- models --------------------------------------------------------------------------------------------


def test_the_sizes_of_a_gpt_are_those_of_the_model_of_train_text(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "scripts" / "training"))
    text_model = __import__("text_model")
    module = text_model.GPT(text_model.ModelSize(2, 4, 64, 32))
    tokens = torch.zeros(3, 32, dtype=torch.long)
    counted = count("gpt", module, tokens, all_reduces={"blocks.*": 2})
    sizes = gpt(layers=2, heads=4, dim=64, context=32)
    assert sizes.numel == counted.numel == sum(param.numel() for param in module.parameters())
    assert sum(layer.flops for layer in sizes.layers) == sum(layer.flops for layer in counted.layers)
    ones = [1.0] * len(counted.layers)
    found = {block.name: block for block in blocks_of(counted, 1, ones, ones)}
    block, planned_block = found["blocks.0"], blocks_of(sizes, 1, [1.0] * 4, [1.0] * 4)[1]
    assert block.shapes == planned_block.shapes
    assert (block.output_bytes, block.all_reduces) == (planned_block.output_bytes, planned_block.all_reduces)
    assert planned_block.activation_bytes == pytest.approx(block.activation_bytes, rel=0.02)
    sys.modules.pop("text_model", None)


def test_blocks_of_a_counted_transformer():
    model = bench_model("transformer")
    found = blocks_of(model, 1, *[[layer.flops for layer in model.layers]] * 2)
    assert [block.name for block in found] == ["embedding", *(f"layers.{n}" for n in range(6)), "head"]
    assert {block.all_reduces for block in found[1:-1]} == {2}
    assert found[1].output_bytes == 32 * 256 * 4
    assert found[1].forward_s == 24 * 32 * 256**2 + 4 * 32**2 * 256


def test_gpt_from_text():
    assert gpt_from_text("gpt(layers=2, dim=64)") == gpt(layers=2, dim=64)
    for text in ("gpt(width=3)", "gpt(dim=10, heads=4)", "gpt(layers=0)"):
        with pytest.raises(InvalidArgument):
            gpt_from_text(text)


def test_a_saved_step_keeps_its_blocks(tmp_path):
    profile = step(2, all_reduces=2)
    write_step(tmp_path / "step.json", profile)
    assert read_step(tmp_path / "step.json") == profile


def test_the_times_of_a_measured_step_are_divided_as_its_operations():
    model = gpt(layers=2)
    counted = profile_of(model, quick(1, flops_per_s=1e9), 4)
    measured = replace(counted, blocks=()).slower(3.0).with_blocks_of(model)
    expected = [block.forward_s for block in counted.slower(3.0).blocks]
    assert [block.forward_s for block in measured.blocks] == pytest.approx(expected)


def test_blocks_of_another_model_are_refused():
    counted = profile_of(gpt(layers=2), quick(1, flops_per_s=1e9), 4)
    with pytest.raises(InvalidArgument, match="parameters"):
        counted.with_blocks_of(gpt(layers=3))


def test_the_timeline_of_a_pipeline_has_a_row_for_each_stage(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    from mpisgd.tools.plan.pictures import draw_timelines

    found = planned("Parallel(pp=2)", hosts(), step())
    assert {task.track for task in found.step.tasks} == {"stage 0", "stage 1", "messages"}
    draw_timelines(tmp_path / "step.png", [found], ["a pipeline"])
    assert pyplot.imread(tmp_path / "step.png").std() > 0
