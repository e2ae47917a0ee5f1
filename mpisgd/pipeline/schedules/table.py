"""A timeline as text: one row per rank, one column per time slot."""

from mpisgd.pipeline.schedules.timeline import PipelineTimeline, Span

__all__ = ["table"]


def table(timeline: PipelineTimeline, *, versions: bool = False) -> str:
    """Return a timeline in whole time slots as text.

    `F3` is the forward of micro-batch 3, `B3` its backward, `F2.3` that of stage 2 where a rank has several
    stages, `.` is waiting.

    Args:
        timeline: as `simulate` returns it for whole numbers.
        versions: whether to tell which version of the weights is read, as in `F3v1`.
    """
    work = [[span for span in spans if span.action.kind.is_compute] for spans in timeline.spans]
    by_stage = any(len({span.action.stage for span in spans}) > 1 for spans in work)
    num_slots = max((int(span.end) for spans in work for span in spans), default=0)
    rows = [["." for _ in range(num_slots)] for _ in work]
    for row, spans in zip(rows, work, strict=True):
        for span in spans:
            for slot in range(int(span.begin), int(span.end)):
                row[slot] = _cell(span, by_stage, versions)
    width = max((len(cell) for row in rows for cell in row), default=1)
    lines = [["time", *map(str, range(num_slots))]]
    lines += [[f"rank {rank}", *row] for rank, row in enumerate(rows)]
    first = max(len(line[0]) for line in lines)
    return "\n".join(
        " ".join([line[0].ljust(first), *(cell.rjust(max(width, 2)) for cell in line[1:])]) for line in lines
    )


def _cell(span: Span, by_stage: bool, versions: bool) -> str:
    action = span.action
    name = f"{action.stage}.{action.micro_batch}" if by_stage else f"{action.micro_batch}"
    return action.kind.value + name + (f"v{action.version}" if versions else "")
