"""A started run that only generates, for benchmarks that compare throughputs."""

from __future__ import annotations

from typing import Any, Self

from distributed import Client

from libra.config import RunConfig
from libra.driver.run_session import Session
from libra.graph.iteration import iteration_graph
from libra.store.event_log import read_events

ITERATIONS = 1000
"""``run.eta`` of such a run: no gate closes."""
Event = dict[str, Any]


class OnlyRollouts:
    """A context manager; ``client``: of a cluster that others share."""

    def __init__(self, config: RunConfig, client: Client | None = None) -> None:
        self.session, self.k = Session(config, client=client), 0

    def __enter__(self) -> Self:
        self.session.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.session.__exit__(*error)

    def groups(self) -> list[dict[str, Any]]:
        graph = iteration_graph(self.session.spec, self.k)
        futures = self.session.client.compute(graph.groups, optimize_graph=False)
        self.k += 1
        return self.session.client.gather(futures)  # type: ignore[no-any-return]

    def last(self) -> tuple[list[Event], float]:
        """Finished quanta of the last iteration, and its seconds from dispatch to report."""
        self.session.client.run_on_scheduler(flush_events)
        log, prefix = read_events(self.session.directory / "events.jsonl").events, f"trajectory-train-{self.k - 1}-"
        mine = [event for event in log if str(event.get("key", "")).startswith(prefix)]
        finished = [event for event in mine if event["name"] == "quantum_finished"]
        began_s = min(event["t_s"] for event in mine if event["name"] == "quantum_dispatched")
        return finished, max(event["t_s"] for event in finished) - began_s


def flush_events(dask_scheduler: Any) -> None:
    for state in dask_scheduler.plugins["libra"].runs.values():
        state.log.flush()
