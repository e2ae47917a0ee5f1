"""What the values of a state go through when the ranks change."""

from __future__ import annotations

from mpisgd.elastic.state_handlers import handler_for


class Metric:
    """Counts, and can be told to begin again; torchmetrics have such a method."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def reset(self) -> None:
        self.count = 0


def test_a_metric_is_not_reset_when_the_ranks_change():
    # `reset()` of whatever has one was called: a metric was wiped at every recovery.
    metric = Metric()
    metric.count = 5
    handler = handler_for(metric)
    saved = handler.save(None)
    metric.count = 9
    handler.restore(saved)
    handler.reset()
    assert metric.count == 5
