"""Planning beside a run: after each iteration it says how long the next one will take, and in a thread what would be better.

1. Each iteration's seconds are predicted before it begins, from what this run measured; the prediction is compared when it ends.
2. The run never waits for a plan: one that is not ready when the next iteration ends is passed over, and the iteration after is
   planned from newer numbers.
3. Every consideration is in the event log, accepted or not, and predicted against realised seconds are metrics.
4. Nothing is changed unless ``planner.apply`` says so: then roles of hybrid workers, as `libra.graph.replanning` decides.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from libra.config import RunConfig
from libra.errors import LibraError
from libra.graph.engines import EngineKind
from libra.graph.questions import Questions
from libra.graph.replanning import Replanning, RoleCalls, fields_of
from libra.graph.spec import RunSpec
from libra.planner import PlanLoop, Realised
from libra.planner.commands import Deployed
from libra.planner.configured import snapshot_of
from libra.planner.cost import Workload
from libra.planner.loop import Outcome
from libra.planner.measured import Expected, StepForecast, Taken
from libra.planner.replan import Rules
from libra.store.trajectories import TrajectoryStore

logger = logging.getLogger(__name__)


class Planning:
    """The planner of one run.

    Parameters
    ----------
    spec : RunSpec
    engines : callable
        The kind of engine of each rollout worker that is there, by name.
    write : callable
        Takes (iteration, metrics) of an iteration.
    tell : callable
        Takes (name, fields) of an event for the run's log; run and time are added there.
    roles : RoleCalls, optional
        Where accepted plans are to be carried out.
    """

    def __init__(
        self,
        spec: RunSpec,
        engines: Callable[[], Mapping[str, EngineKind]],
        write: Callable[[int, Mapping[str, float]], None],
        tell: Callable[[str, Mapping[str, Any]], None],
        roles: RoleCalls | None = None,
    ) -> None:
        self._spec, self._write, self._tell = spec, write, tell
        self._engines, self._kinds = engines, dict[str, EngineKind]()
        self._questions = Questions(spec.make_environment(), spec.config.trainer.prompts)
        self._loop: PlanLoop | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="libra-planner")
        self._pending: Future[tuple[int, Outcome]] | None = None
        self.forecast = StepForecast()
        self.predicted: Expected | None = None
        self._first: int | None = None
        self._replanning: Replanning | None = None
        if roles is not None:
            rules = Rules(first_cost_s=spec.config.planner.change_cost_s)
            self._replanning = Replanning(roles, spec.config.cluster.train_workers, tell, rules)

    def after(self, iteration: int, values: Mapping[str, Any], remaining: int) -> None:
        """Hear the numbers of an iteration: compare them, predict the next one, and hand in what the last call's thread has found.

        ``values["evaluation_s"]``, where there, is the part of ``iteration_s`` in which held-out questions were asked.
        """
        config = self._spec.config
        self._first = iteration if self._first is None else self._first
        present = dict(self._engines())
        self._kinds |= present
        engines = Counter(kind_name(kind) for kind in present.values())
        alone = iteration == self._first or follows_evaluation(config, iteration)
        realised, predicted = realised_seconds(values, config, alone), self.predicted
        self.forecast = self.forecast.after(taken(values, realised, self._kinds), engines)
        self._write(iteration, self._compared(realised, predicted))
        overlap = config.run.eta > 0 and not follows_evaluation(config, iteration + 1)
        self.predicted = self.forecast.expected(engines, self._questions.lengths(iteration + 1), overlap)
        if self._replanning is not None:
            kinds = {name: kind_name(kind) for name, kind in self._kinds.items()}
            self._replanning.after(
                iteration, values, realised.step_s, kinds, present, self.forecast, max(remaining, 0), overlap
            )
            return
        if self._pending is not None:
            if not self._pending.done():
                return
            self._take(self._pending)
        deployed = deployed_engines(list(present.values()), config.cluster.train_workers)
        predicted_s = None if predicted is None else predicted.step_s
        self._pending = self._thread.submit(self._consider, iteration, realised, remaining, deployed, predicted_s)

    def _compared(self, realised: Realised, predicted: Expected | None) -> dict[str, float]:
        """Metrics of an iteration: its seconds against the prediction that was made before it, and what was measured."""
        values = {"plan/realised_s": realised.step_s, "plan/realised_rollout_s": realised.rollout_s}
        if predicted is not None:
            values |= {
                "plan/predicted_s": predicted.step_s,
                "plan/error_frac": predicted.step_s / realised.step_s - 1.0,
                "plan/predicted_rollout_s": predicted.rollout_s,
                "plan/predicted_train_s": predicted.train_s,
                "plan/predicted_tokens": predicted.tokens,
            }
        speeds = self.forecast.tokens_per_s()
        return values | {f"plan/tokens_per_s/{kind}": speed for kind, speed in speeds.items()}

    def close(self) -> None:
        """Wait for the plan in hand and write it down."""
        self._thread.shutdown(wait=True)
        if self._pending is not None:
            self._take(self._pending)
            self._pending = None

    def _consider(
        self, iteration: int, realised: Realised, remaining: int, deployed: Deployed, predicted_s: float | None
    ) -> tuple[int, Outcome]:
        workload = batch_workload(self._spec, iteration)
        if self._loop is None:
            self._loop = PlanLoop(run_snapshot(self._spec, workload, deployed), deployed)
        outcome = self._loop.after(iteration, realised, workload, max(remaining, 0), predicted_s)
        self._loop.deployed_is(deployed)
        return iteration, outcome

    def _take(self, pending: Future[tuple[int, Outcome]]) -> None:
        try:
            iteration, outcome = pending.result()
        except LibraError as error:  # no plan fits, or the model is unknown to the cost model: the run goes on without
            logger.warning("no plan: %s", error)
            return
        self._write(iteration, {f"plan/{name}": value for name, value in outcome.learned.items()})
        considered = outcome.considered
        logger.info("%s: plan of %.2f s a step %s", considered.reason, considered.proposed_step_s,
                    "accepted" if considered.accepted else "not accepted")  # fmt: skip
        for event in outcome.events(self._spec.run, 0.0):
            self._tell(event.name, fields_of(event))


def follows_evaluation(config: RunConfig, iteration: int) -> bool:
    """Whether held-out questions are asked between the iteration before and this one, so that nothing of it began earlier."""
    every = config.evaluation.every
    return every > 0 and iteration > 0 and iteration % every == 0


def realised_seconds(values: Mapping[str, Any], config: RunConfig, alone: bool = False) -> Realised:
    """Seconds of rollout, training and step out of an iteration's numbers, evaluations left out of all.

    Rollout is what is neither training nor publishing: engines wait for both. Where steps overlap (eta >= 1) the longer of the two
    is what was seen of rollout, but for an iteration with none before it to overlap with (``alone``).
    """
    step_s = float(values["iteration_s"]) - float(values.get("evaluation_s", 0.0))
    train_s = max(float(values.get("train_s", 0.0)), 1e-6)
    waits_s = train_s + float(values.get("publish_s", 0.0))
    rollout_s = step_s - waits_s if config.run.eta == 0 or alone else step_s
    return Realised(max(rollout_s, 1e-6), train_s, step_s)


def taken(values: Mapping[str, Any], realised: Realised, kinds: Mapping[str, EngineKind]) -> Taken:
    """An iteration as `libra.planner.measured` hears of it; tokens of a worker that was gone at its end count with no kind."""
    tokens: Counter[str] = Counter()
    for worker, number in values["worker_tokens"].items():
        tokens[kind_name(kinds[worker]) if worker in kinds else "gone"] += number
    return Taken(
        realised.rollout_s,
        realised.training_s,
        float(values.get("publish_s", 0.0)),
        realised.step_s,
        tokens,
        [(float(chars), float(number)) for chars, number in values["question_tokens"]],
        [(float(chars), float(number)) for chars, number in values.get("trained_tokens", ())],
    )


def kind_name(kind: EngineKind) -> str:
    """Name of engines that are alike, slots included."""
    return f"{kind.bucket}-slots{kind.slots}"


def deployed_engines(kinds: Sequence[EngineKind], trainers: int) -> Deployed:
    """What runs: a training GPU for each trainer, engines by TP degree, and of each degree the mean of their slots."""
    slots: dict[int, list[int]] = {}
    for kind in kinds:
        slots.setdefault(kind.tp, []).append(kind.slots)
    return Deployed(
        trainers,
        {tp: len(each) for tp, each in slots.items()},
        {tp: max(round(sum(each) / len(each)), 1) for tp, each in slots.items()},
    )


def run_snapshot(spec: RunSpec, workload: Workload, deployed: Deployed) -> Any:
    """The planner's snapshot of this run: its trainer, and the GPUs that its engines have (a rank of one on a CPU is one)."""
    gpus = deployed.train_gpus + sum(tp * number for tp, number in deployed.engines.items())
    section = spec.config.planner.model_copy(
        update={
            "num_gpus": gpus,
            "update_s": 0.0,
            "max_concurrency": max(deployed.concurrency.values()),
            "tp": sorted(deployed.engines),
        }
    )
    model = spec.config.model.model_copy(update={"path": spec.model_dir})
    config = spec.config.model_copy(update={"planner": section, "model": model})
    snapshot, _ = snapshot_of(config, workload, what_if=False)
    return replace(snapshot, fixed_train_gpus=deployed.train_gpus)


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
