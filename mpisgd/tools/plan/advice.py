"""What to change: the best prediction again with one thing better than it is."""

from dataclasses import dataclass, replace

import mpisgd
from mpisgd.layouts.layout import MeshLayout
from mpisgd.methods.cast.cast import CASTS, Compression
from mpisgd.methods.from_text import call_of
from mpisgd.methods.sharded.cost import FullyShard
from mpisgd.tools.bench.strategies.method import Method
from mpisgd.tools.plan.cluster import Cluster
from mpisgd.tools.plan.methods import Overlap
from mpisgd.tools.plan.models.model import StepProfile
from mpisgd.tools.plan.prediction import Options, Prediction, predict, with_faster
from mpisgd.tools.plan.steps.parallel import Parallel

__all__ = ["Change", "changes", "code_line", "command_line", "equals_one_process"]

TWICE = 2.0
TEXT_SIZES = ("layers", "heads", "dim", "context")  # of gpt(...) and of train_text.py


@dataclass(frozen=True)
class Change:
    """What a step would take if something was better.

    Attributes:
        what: for people.
        step_s: then.
        saved: share of the step that it saves.
    """

    what: str
    step_s: float
    saved: float


def changes(
    cluster: Cluster, profile: StepProfile, method: Method, options: Options | None = None
) -> list[Change]:
    """Return the time that each part of the cluster would save if it were twice as fast; most first."""
    now = predict(cluster, profile, method, options).step_s
    tried = {
        "ranks that compute twice as fast": (cluster, profile.slower(1 / TWICE)),
        "an optimizer twice as fast": (cluster, replace(profile, optimizer_s=profile.optimizer_s / TWICE)),
        "half the latency": (with_faster(cluster, "latency", TWICE), profile),
        "ranks of a host joined twice as fast": (with_faster(cluster, "within", TWICE), profile),
    }
    if cluster.hosts > 1:
        tried["links between hosts twice as fast"] = (with_faster(cluster, "between", TWICE), profile)
    if cluster.compute_spread:
        tried["ranks of equal speed"] = (replace(cluster, compute_spread=0.0), profile)
    found = []
    for what, (there, step) in tried.items():
        then = predict(there, step, method, options).step_s
        found.append(Change(what, then, 1 - then / now))
    return sorted(found, key=lambda change: -change.saved)


EXACT = (mpisgd.Synchronous, mpisgd.Sharded, FullyShard, Overlap)


def equals_one_process(method: Method) -> bool:
    """Return whether ranks compute what one process computes on the joined batch."""
    strategy = method.strategy
    if isinstance(strategy, (Parallel, MeshLayout)):
        return True
    sums = isinstance(strategy, EXACT) or getattr(strategy, "mode", "") == "sync"
    return sums and method.compression == Compression.none


def command_line(prediction: Prediction, method: Method) -> str:
    """Return the command for the ranks of a prediction: of a layout, the program that divides a GPT."""
    program, hosts = "train.py", " --hostfile hosts" if prediction.cluster.hosts > 1 else ""
    if isinstance(method.strategy, Parallel):
        program = f"scripts/train_text.py {text_options(prediction, method.strategy)}"
    return f"python -m mpisgd run -n {prediction.cluster.size}{hosts} {program}"


def text_options(prediction: Prediction, layout: Parallel) -> str:
    """Return the options of `scripts/train_text.py` for a layout, and for a model that is `gpt(...)`."""
    size, profile = prediction.cluster.size, prediction.profile
    together = layout.tp * layout.cp * layout.pp
    axes = {"dp": size // together, "cp": layout.cp, "tp": layout.tp, "pp": layout.pp}
    own = layout.pp > 1 and layout.tp == 1  # `mpisgd.pipeline`; the others are torch's
    words = [f"--pipeline {layout.schedule}"] if own else []
    words.append("--parallel " + ",".join(f"{axis}={n}" for axis, n in axes.items() if n > 1))
    number = layout.micro_batches_of(profile.batch * together)
    words += [f"--accumulate {number}"] if number > 1 else []
    words += ["--checkpoint-activations"] if layout.recompute else []
    if profile.name.startswith("gpt("):
        _, _, sizes = call_of("model", profile.name)
        words += [f"--{name} {sizes[name]}" for name in TEXT_SIZES]
    return " ".join([*words, f"--batch-size {profile.batch * size:g}"])


def code_line(method: Method) -> str:
    """Return the call in the program that trains by a method."""
    strategy, _, compression = (word.strip() for word in method.name.partition("+"))
    if isinstance(method.strategy, Parallel):
        return _code_of_layout(method.strategy)
    if isinstance(method.strategy, MeshLayout):
        return f"mpisgd.{method.strategy.text}.distribute(model, names, ...)"
    if isinstance(method.strategy, FullyShard):
        return "torch.distributed.fsdp.fully_shard(model)  # after init_process_group('mpisgd')"
    arguments = []
    if isinstance(method.strategy, Overlap):
        arguments.append(f"overlap={method.strategy.overlap}")
    elif method.name != "Synchronous":
        arguments.append(f"strategy=mpisgd.{strategy}{'' if '(' in strategy else '()'}")
    if compression:
        place = "Compression" if compression in CASTS else "compress"
        arguments.append(f"compression=mpisgd.{place}.{compression}")
    return f"mpisgd.DistributedOptimizer({', '.join(['optimizer', *arguments])})"


def _code_of_layout(layout: Parallel) -> str:
    if layout.cp > 1:
        return "mpisgd.context_parallel(mesh['cp'], buffers=..., buffer_seq_dims=...)  # around each batch"
    if layout.tp > 1:
        return "torch.distributed.tensor.parallel.parallelize_module(...)  # scripts/training/parallelize.py"
    checkpoint = ", checkpoint=True" if layout.recompute else ""
    return (
        f"mpisgd.pipeline.Pipeline(stages, schedule={layout.schedule!r}, replicas=dp, "
        f"num_micro_batches=dp * per_pipeline, loss=loss, optimizer=make_optimizer{checkpoint})"
    )
