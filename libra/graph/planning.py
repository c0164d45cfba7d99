"""Planning beside a run: after each iteration the planner learns what it took and says what would be better, in a thread.

1. The run never waits for it: a plan that is not ready when the next iteration ends is passed over, and the iteration after is
   planned from newer numbers.
2. Every consideration is in the event log, accepted or not, and predicted against realised seconds are metrics.
3. Commands of an accepted plan are logged, not applied: nothing here changes what runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from libra.config import RunConfig
from libra.errors import LibraError
from libra.events import to_dict
from libra.graph.spec import RunSpec
from libra.planner import PlanLoop, Realised
from libra.planner.commands import Deployed
from libra.planner.configured import snapshot_of
from libra.planner.cost import Workload
from libra.planner.loop import Outcome
from libra.store.trajectories import TrajectoryStore

logger = logging.getLogger(__name__)


class Planning:
    """The planner of one run.

    Parameters
    ----------
    spec : RunSpec
    num_engines : int
        Rollout workers of the cluster.
    write : callable
        Takes (iteration, metrics) of an outcome.
    tell : callable
        Takes (name, fields) of an event for the run's log; run and time are added there.
    """

    def __init__(
        self,
        spec: RunSpec,
        num_engines: int,
        write: Callable[[int, Mapping[str, float]], None],
        tell: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self._spec, self._write, self._tell = spec, write, tell
        self._engines = num_engines
        self._loop: PlanLoop | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="libra-planner")
        self._pending: Future[tuple[int, Outcome]] | None = None

    def after(self, iteration: int, values: Mapping[str, Any], remaining: int) -> None:
        """Hear the numbers of an iteration; hands in what the last call's thread has found."""
        if self._pending is not None:
            if not self._pending.done():
                return
            self._take(self._pending)
        realised = realised_seconds(values, self._spec.config)
        self._pending = self._thread.submit(self._consider, iteration, realised, remaining)

    def close(self) -> None:
        """Wait for the plan in hand and write it down."""
        self._thread.shutdown(wait=True)
        if self._pending is not None:
            self._take(self._pending)
            self._pending = None

    def _consider(self, iteration: int, realised: Realised, remaining: int) -> tuple[int, Outcome]:
        workload = batch_workload(self._spec, iteration)
        slots = self._spec.config.rollout.slots
        deployed = Deployed(1, {1: self._engines}, {1: slots})
        if self._loop is None:
            self._loop = PlanLoop(run_snapshot(self._spec, workload, self._engines), deployed)
        outcome = self._loop.after(iteration, realised, workload, max(remaining, 0))
        self._loop.deployed_is(deployed)
        return iteration, outcome

    def _take(self, pending: Future[tuple[int, Outcome]]) -> None:
        try:
            iteration, outcome = pending.result()
        except LibraError as error:  # no plan fits, or the model is unknown to the cost model: the run goes on without
            logger.warning("no plan: %s", error)
            return
        self._write(iteration, outcome.metrics)
        considered = outcome.considered
        logger.info("%s: plan of %.2f s a step %s", considered.reason, considered.proposed_step_s,
                    "accepted" if considered.accepted else "not accepted")  # fmt: skip
        for event in outcome.events(self._spec.run, 0.0):
            fields = {
                name: value for name, value in to_dict(event).items() if name not in ("schema", "name", "run", "t_s")
            }
            self._tell(event.name, fields)


def realised_seconds(values: Mapping[str, Any], config: RunConfig) -> Realised:
    """Seconds of rollout, training and step out of an iteration's numbers.

    What is no training is rollout, with what both wait for (publishing, storing): the engines are idle then, and the planner's
    factor for rollout carries it. Where steps overlap (eta >= 1) the longer of the two is what was seen of rollout.
    """
    step_s, train_s = float(values["iteration_s"]), max(float(values.get("train_s", 0.0)), 1e-6)
    rollout_s = step_s - train_s if config.run.eta == 0 else step_s
    return Realised(max(rollout_s, 1e-6), train_s, step_s)


def run_snapshot(spec: RunSpec, workload: Workload, num_engines: int) -> Any:
    """The planner's snapshot of this run: one trainer, and one engine of one GPU per rollout worker."""
    section = spec.config.planner.model_copy(
        update={"num_gpus": num_engines + 1, "update_s": 0.0, "max_concurrency": spec.config.rollout.slots, "tp": [1]}
    )
    model = spec.config.model.model_copy(update={"path": spec.model_dir})
    config = spec.config.model_copy(update={"planner": section, "model": model})
    snapshot, _ = snapshot_of(config, workload, what_if=False)
    return snapshot


def batch_workload(spec: RunSpec, batch: int) -> Workload:
    """The trajectories that a batch consumed, from the store."""
    with TrajectoryStore.open(spec.store_path) as store:
        rows, turns = store.columns("trajectory"), store.columns("turn")
    of_batch = np.flatnonzero(rows["batch"] == batch)
    place = np.full(len(rows["batch"]), -1)
    place[of_batch] = np.arange(len(of_batch))
    at = place[turns["trajectory"]]
    mine = at >= 0

    def total(name: str) -> np.ndarray[Any, Any]:
        return np.bincount(at[mine], weights=turns[name][mine], minlength=len(of_batch)).astype(np.float64)

    first = mine & (turns["turn"] == 0)
    prompt = np.bincount(at[first], weights=turns["prompt_tokens"][first], minlength=len(of_batch))
    return Workload(
        prompt.astype(np.float64),
        np.maximum(total("generated_tokens"), 1.0),
        total("observation_tokens"),
        np.maximum(rows["num_turns"][of_batch].astype(np.float64), 1.0),
        total("tool_s"),
    )
