"""Cluster and model files: TOML that a user writes, or a profile that `python -m mpisgd tune` has measured.

hosts = 16
ranks_per_host = 8
flops = "20 Tflop/s"            # of a rank, in training
memory = "80 GiB"               # of a rank
memory_bandwidth = "2 TB/s"     # of a rank
price_per_hour = 12.0           # of a host

[within]                        # between the ranks of a host; shared = true: memory that all share
latency = "5 us"
bandwidth = "200 GB/s"
shared = false

[between]                       # a host's link
latency = "10 us"
bandwidth = "100 Gbit/s"

[network]                       # one switch, unless something else is said
topology = "fat tree"
hosts_per_switch = 32
oversubscription = 4

[failures]
mtbf_hours = 20000              # of a host

[compression]                   # seconds to compress and decompress an element
"PowerSGD(rank=4)" = 2e-10
"""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, NamedTuple

from mpisgd.arguments import shown
from mpisgd.errors import InvalidArgument
from mpisgd.tools.plan.cluster import Cluster, Failures, Link
from mpisgd.tools.plan.models.blocks import Block
from mpisgd.tools.plan.models.model import MOST_LAYERS, Gradient, Layer, Model, StepProfile
from mpisgd.tools.plan.network import FatTree, Network, Switch, Torus
from mpisgd.tools.plan.units import as_flops, as_nbytes, as_rate, as_seconds
from mpisgd.tuning.model import CostModel, MeasuredCurves
from mpisgd.tuning.profile import ProfileError, read

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["ClusterFile", "link_from_times", "read_cluster", "read_model", "read_step", "write_step"]

STEP_FORMAT = "mpisgd step"
Table = dict[str, Any]


class ClusterFile(NamedTuple):
    """What a cluster file has.

    Attributes:
        cluster: all of it.
        compression_s: seconds of an element, by compressor; those that are given.
        assumed: what counts and is not given, in words.
    """

    cluster: Cluster
    compression_s: Mapping[str, float]
    assumed: Sequence[str] = ()


def read_cluster(path: Path) -> ClusterFile:
    """Return the cluster of a TOML file, or of a profile of `tune` (.json).

    Raises:
        InvalidArgument: there is no such file, or something in it is not understood; says what.
    """
    if path.suffix == ".json":
        return ClusterFile(_measured_cluster(path), {}, _assumed({}, is_measured=True))
    page = _toml(path)
    profile = page.pop("profile", None)
    table = _table("compression", page.pop("compression", {}))
    compression = {str(k): as_seconds(f"compression.{k}", v) for k, v in table.items()}
    measured = None if profile is None else _measured_cluster(path.parent / str(profile))
    assumed = _assumed(page, is_measured=measured is not None)
    return ClusterFile(Cluster(**_fields(page, measured)), compression, assumed)


def _assumed(page: Table, *, is_measured: bool) -> list[str]:
    """Return the defaults that a file leaves: first those that decide which method is best, then the rest."""
    found = []
    if "memory_bandwidth" not in page:
        rate = Cluster.memory_bytes_per_s / 1e9
        found.append(
            f'memory_bandwidth = "{rate:g} GB/s", as a core of a CPU has; a GPU has a hundred times that'
        )
    defaults = {field.name: field.default for field in dataclasses.fields(Cluster)}
    rest = [
        f"{key} = {defaults[name]:g}"
        for key, (name, _) in SCALARS.items()
        if key not in (*page, "memory_bandwidth", *(["operation"] if is_measured else []))
        and isinstance(defaults[name], float)
    ]
    links = {field.name: field.default for field in dataclasses.fields(Link)} | {"message_s": MESSAGE_S}
    for table in ("within", "between"):
        given = page.get(table, {}) if not is_measured else dict.fromkeys(LINK)
        rest += [
            f"[{table}] {key} = {links[name]:g}"
            for key, (name, _) in LINK.items()
            if key not in given and name in links and links[name] is not MISSING
        ]
    if not is_measured and "shared" not in page.get("within", {}):
        rest.append("[within] shared = true")
    if "network" not in page:
        rest.append('[network] topology = "switch"')
    return [*found, *([", ".join(rest)] if rest else [])]


def _toml(path: Path) -> Table:
    try:
        page: Table = tomllib.loads(path.read_text())
    except OSError as exc:
        raise InvalidArgument(f"{path}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise InvalidArgument(f"{path}: {exc}") from exc
    return page


# Keys of the file, and what they are of the cluster.
SCALARS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "hosts": ("hosts", lambda name, value: value),
    "ranks_per_host": ("ranks_per_host", lambda name, value: value),
    "flops": ("flops_per_s", as_flops),
    "memory": ("memory_bytes", as_nbytes),
    "memory_bandwidth": ("memory_bytes_per_s", as_rate),
    "operation": ("operation_s", as_seconds),
    "meeting": ("meeting_s", as_seconds),
    "busy_meeting": ("busy_meeting_s", as_seconds),
    "tensor": ("tensor_s", as_seconds),
    "fresh_memory_per_byte": ("fresh_s_per_byte", as_seconds),
    "disk": ("disk_bytes_per_s", as_rate),
    "half_factor": ("half_factor", lambda name, value: value),
    "price_per_hour": ("price_per_hour", lambda name, value: value),
    "compute_spread": ("compute_spread", lambda name, value: value),
}
LINK: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "latency": ("latency_s", as_seconds),
    "bandwidth": ("bytes_per_s", as_rate),
    "both_ways": ("both_ways", lambda name, value: value),
    "message": ("message_s", as_seconds),
    "cpu_per_byte": ("cpu_s_per_byte", as_seconds),
}
FAILURES: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "mtbf_hours": ("mtbf_hours", lambda name, value: value),
    "checkpoint": ("checkpoint_s", as_seconds),
    "restart": ("restart_s", as_seconds),
    "recovery": ("recovery_s", as_seconds),
    "repair_hours": ("repair_hours", lambda name, value: value),
}
MESSAGE_S = 5e-7  # what sending one takes of a processor where nothing else is said
REQUIRED = ("hosts", "ranks_per_host", "within", "between")


def _fields(page: Table, measured: Cluster | None) -> Table:
    """Return the arguments of `Cluster`: those of a profile, and what the file says before them."""
    page = dict(page)
    fields: Table = dict(vars(measured)) if measured is not None else {}
    for name in ("within", "between"):
        if (table := page.pop(name, None)) is not None:
            table = dict(_table(name, table))
            if name == "within" and "shared" in table:
                fields["within_is_shared"] = table.pop("shared")
            known = vars(fields[name]) if name in fields else {"message_s": MESSAGE_S}
            fields[name] = Link(**_needed(name, {**known, **_taken(name, table, LINK)}))
    if (table := page.pop("network", None)) is not None:
        fields["network"] = _network(_table("network", table))
    if (table := page.pop("failures", None)) is not None:
        taken = _taken("failures", _table("failures", table), FAILURES)
        if "mtbf_hours" not in taken:
            raise InvalidArgument("cluster file: [failures] needs mtbf_hours, of one host")
        fields["failures"] = Failures(**taken)
    fields |= _taken("cluster file", page, SCALARS)
    if missing := [name for name in REQUIRED if name not in fields]:
        raise InvalidArgument(f"cluster file: `{missing[0]}` is missing")
    return fields


def _needed(name: str, fields: Table) -> Table:
    for key, field in (("latency", "latency_s"), ("bandwidth", "bytes_per_s")):
        if field not in fields:
            raise InvalidArgument(f"cluster file: [{name}] needs {key}")
    return fields


def _table(name: str, value: Any) -> Table:
    if not isinstance(value, dict):
        raise InvalidArgument(f"cluster file: {name}={shown(value)}; expected a table, [{name}]")
    return value


def _taken(where: str, table: Table, known: Mapping[str, tuple[str, Callable[[str, Any], Any]]]) -> Table:
    """Return the entries of a table under the names and in the units of the classes."""
    if unknown := sorted(set(table) - set(known)):
        raise InvalidArgument(f"{where}: unknown {', '.join(unknown)}; expected some of {', '.join(known)}")
    return {known[key][0]: known[key][1](f"{where}: {key}", value) for key, value in table.items()}


def _network(table: Table) -> Network:
    options = dict(table)
    kinds: dict[str, Any] = {"switch": Switch, "fat tree": FatTree, "torus": Torus}
    name = options.pop("topology", "switch")
    if not isinstance(name, str) or name not in kinds:
        raise InvalidArgument(f"network: topology={shown(name)}; expected one of {', '.join(kinds)}")
    known = {field.name: field.default is MISSING for field in dataclasses.fields(kinds[name])}
    needed = [key for key, is_needed in known.items() if is_needed]
    if (set(options) - set(known)) or (set(needed) - set(options)):
        expected = f"{', '.join(known)} (needed: {', '.join(needed)})" if known else "nothing else"
        raise InvalidArgument(
            f"network: a {name} with {', '.join(options) or 'nothing'}; expected {expected}"
        )
    network: Network = kinds[name](**options)
    return network


# -- measured by tune ----------------------------------------------------------------------------------


def _measured_cluster(path: Path) -> Cluster:
    """Return the links by the curves of a profile."""
    try:
        costs = read(path)
    except FileNotFoundError as exc:
        raise InvalidArgument(f"{path}: no such file") from exc
    except ProfileError as exc:
        raise InvalidArgument(f"{path}: {exc}") from exc
    widest = max(costs.measured, key=lambda one: (len(one.ranks_per_host), sum(one.ranks_per_host)))
    if len(set(widest.ranks_per_host)) > 1:
        raise InvalidArgument(
            f"{path}: hosts of {widest.ranks_per_host} ranks; expected equally many on each"
        )
    hosts, k = len(widest.ranks_per_host), widest.ranks_per_host[0]
    within, between, operation_s = link_from_times(hosts, k, *_times(costs, widest))
    local = next((one for one in costs.measured if len(one.ranks_per_host) == 1), None)
    if hosts > 1 and local is not None:
        within = link_from_times(1, local.ranks_per_host[0], *_times(costs, local))[0]
    return Cluster(hosts, k, between, within, operation_s=operation_s)


def _times(costs: CostModel, one: MeasuredCurves) -> tuple[float, float, float]:
    """Return the seconds of the smallest and the largest measured all-reduce, and the latter's bytes."""
    algorithm = "node" if len(one.ranks_per_host) == 1 else "hierarchical"
    curves = [curve for curve in one.curves if curve.algorithm == algorithm and not curve.half]
    sizes = [round(nbytes) for curve in curves for nbytes, _ in curve.points]
    if not sizes:
        raise InvalidArgument(f"{costs.source}: {algorithm} is not measured; expected it among its curves")
    here = costs.at(one.ranks_per_host)
    return here.seconds(algorithm, min(sizes)), here.seconds(algorithm, max(sizes)), max(sizes)


def link_from_times(
    hosts: int, ranks_per_host: int, small_s: float, large_s: float, nbytes: float
) -> tuple[Link, Link, float]:
    """Return the links within and between hosts, and what an operation takes besides, from two all-reduces.

    A small one is the check of its operation, with which it travels: a message to each other host, and a
    meeting of the ranks on each. A large one takes, besides, what its bytes take: 2 (h - 1) / h of them leave
    each host, or on one host all ranks read (k - 1) / k of everyone's twice.

    Args:
        hosts: of the job, h.
        ranks_per_host: k.
        small_s: what an all-reduce of some bytes takes.
        large_s: what one of `nbytes` takes.
        nbytes: so many that bandwidth is what counts.
    """
    per_byte = max(1e-15, (large_s - small_s) / nbytes)
    if hosts == 1:
        link = Link(small_s / 2, max(1.0, 2.0 * (ranks_per_host - 1)) / per_byte)
        return link, link, small_s / 2
    return Link(small_s / 4, 1e10), Link(small_s / 2, 2 * (hosts - 1) / hosts / per_byte), small_s / 2


# -- models and steps ----------------------------------------------------------------------------------


def read_model(path: Path) -> Model:
    """Return the model of a TOML file: `itemsize`, and tables [[layer]] in the order of the forward pass.

    Of a layer: `name`, `shapes` or `parameters` (how many), `flops` of one example forward, `activations`
    and `outputs` (bytes of one example), `all_reduces` (see `Block`), `keys` (bytes of the keys and values of
    its attention, of one example) with `attention_flops` (those of `flops` that compute with them), and
    `repeat`. Each is a block.

    Raises:
        InvalidArgument: see `read_cluster`.
    """
    page = _toml(path)
    tables = page.pop("layer", [])
    if not isinstance(tables, list):
        raise InvalidArgument(f"{path}: layer={shown(tables)}; expected tables, [[layer]]")
    layers = [layer for table in tables for layer in _layers(_table("layer", table))]
    options = {name: page.pop(name) for name in ("name", "itemsize") if name in page}
    if page or not layers:
        wrong = f"unknown {', '.join(page)}" if page else "no [[layer]]"
        raise InvalidArgument(f"{path}: {wrong}; expected name, itemsize and [[layer]]")
    return Model(**{"name": path.stem, **options}, layers=tuple(layers))


def _layers(table: Table) -> list[Layer]:
    fields = dict(table)
    name, repeat = str(fields.pop("name", "layer")), fields.pop("repeat", 1)
    if ("shapes" in fields) == ("parameters" in fields):
        raise InvalidArgument(f"layer {name}: expected either shapes or parameters")
    shapes = fields.pop("shapes", None) or [[fields.pop("parameters", 0)]]
    flops = as_flops(f"layer {name}: flops", fields.pop("flops", 0.0))
    activations = as_nbytes(f"layer {name}: activations", fields.pop("activations", 0.0))
    outputs = as_nbytes(f"layer {name}: outputs", fields.pop("outputs", 0.0))
    all_reduces = fields.pop("all_reduces", 0)
    keys = as_nbytes(f"layer {name}: keys", fields.pop("keys", 0.0))
    attention = as_flops(f"layer {name}: attention_flops", fields.pop("attention_flops", 0.0))
    if fields:
        raise InvalidArgument(f"layer {name}: unknown {', '.join(fields)}")
    if not isinstance(repeat, int) or not 1 <= repeat <= MOST_LAYERS:
        raise InvalidArgument(f"layer {name}: repeat={shown(repeat)}; expected 1 to {MOST_LAYERS} layers")
    if not isinstance(shapes, list) or not all(isinstance(shape, list) for shape in shapes):
        raise InvalidArgument(f"layer {name}: shapes={shown(shapes)}; expected such as [[512, 512], [512]]")
    cut = tuple(tuple(shape) for shape in shapes)
    names = [name] if repeat == 1 else [f"{name}.{number}" for number in range(repeat)]
    sizes = (flops, activations, outputs, all_reduces, "", keys, attention)
    return [Layer(each, cut, *sizes) for each in names]


def write_step(path: Path, profile: StepProfile) -> None:
    """Write a measured step, to be planned with again."""
    lists = {
        "gradients": [list(gradient) for gradient in profile.gradients],
        "blocks": [vars(block) for block in profile.blocks],
    }
    page = {"format": STEP_FORMAT, **vars(profile), **lists}
    del page["named"]
    path.write_text(json.dumps(page, indent=1) + "\n")


def read_step(path: Path) -> StepProfile:
    """Return a step that `plan --measure --save` has written.

    Raises:
        InvalidArgument: it is none.
    """
    try:
        page = json.loads(path.read_text())
        if page.pop("format") != STEP_FORMAT:
            raise ValueError("another format")
        gradients = tuple(
            Gradient(str(name), int(place), tuple(map(int, shape)), int(itemsize), float(ready_s))
            for name, place, shape, itemsize, ready_s in page.pop("gradients")
        )
        blocks = tuple(
            Block(**{**block, "shapes": tuple(map(tuple, block["shapes"]))})
            for block in page.pop("blocks", [])
        )
        found = StepProfile(gradients=gradients, blocks=blocks, **page)
    except OSError as exc:
        raise InvalidArgument(f"{path}: {exc.strerror}") from exc
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise InvalidArgument(f"{path}: no step that plan --measure has written ({exc})") from exc
    if not math.isfinite(found.compute_s):
        raise InvalidArgument(f"{path}: no time")
    return found
