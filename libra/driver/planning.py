"""Planning during a run: after each iteration, predict the next one and compare layouts for it.

1. Each iteration's seconds are predicted before it begins, from what this run measured; the prediction is compared when it ends.
2. The run does not wait: graphs are submitted before an iteration ends, and changes are requested, not waited for.
3. Every plan considered is in the event log, accepted or not, and predicted and realised seconds are metrics.
4. Nothing changes unless ``planner.replan`` is apply; the same plans are considered without it (`libra.driver.replanning`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from libra.config import RunConfig
from libra.driver.prompt_checks import UpcomingPrompts
from libra.driver.replanning import Replanning, batch_of
from libra.errors import ModelError
from libra.hardware import ModelShape, load_shape
from libra.observe.metrics import read_metrics
from libra.planner.arrangement_forecast import EndedIteration, run_facts
from libra.planner.arrangements import arranged
from libra.planner.cost import TrajectoryTotals
from libra.planner.cost.training_cost import memory_parts_bytes
from libra.planner.from_config import trainer_layout
from libra.planner.replan import ArrangementLoop, Replanner, SplitDecision
from libra.planner.step_forecast import ExpectedStep, RealisedStep, StepForecast, Taken
from libra.worker.run_spec import RunSpec
from libra.worker.training.batch_numbers import Lengths

if TYPE_CHECKING:
    from libra.driver.run_client import RunClient

logger = logging.getLogger(__name__)


class Planning:
    """The planner of one run.

    Parameters
    ----------
    spec : RunSpec
    scheduler : RunClient
    prompts : UpcomingPrompts
    write : callable
        Takes (iteration, metrics) of an iteration.
    workers_gpu : str
        GPU of the run's workers; empty: none, or not known.
    """

    def __init__(
        self,
        spec: RunSpec,
        scheduler: RunClient,
        prompts: UpcomingPrompts,
        write: Callable[[int, Mapping[str, float]], None],
        workers_gpu: str = "",
    ) -> None:
        self._spec, self._scheduler, self._prompts, self._write = spec, scheduler, prompts, write
        self._kinds: dict[str, str] = {}  # of each worker's last engine
        self.forecast = StepForecast()
        self.predicted: ExpectedStep | None = None
        self._first: int | None = None
        self._shape: ModelShape | None = None
        try:
            self._shape = load_shape(spec.model_dir)
        except ModelError as error:
            logger.info("no prediction of a step's memory: %s", error)
        planner = spec.config.planner
        self.replanning = Replanning(
            scheduler,
            ArrangementLoop(run_facts(spec.config, workers_gpu), Replanner(first_cost_s=planner.change_cost_s)),
            apply=planner.replan == "apply",
            boundaries={str(tp): tokens for tp, tokens in spec.config.policy.boundaries_tokens.items()},
        )

    def begin(self, first: int) -> None:
        """Before iteration ``first`` of a resumed run, change what would run out of memory at the contexts to come.

        Engines, slots, roles and boundaries are as configured again. The contexts are forecast from the mean context
        at the end of the trajectories of earlier iterations.
        """
        rows = [row for row in read_metrics(self._spec.directory) if row.get("trajectories")] if first else []
        contexts = [(int(row["step"]), row["tokens"] / row["trajectories"]) for row in rows if row["step"] < first]
        if contexts:
            self.replanning.begin(contexts, self._scheduler.seats())

    def after(self, iteration: int, values: Mapping[str, Any], remaining: int) -> None:
        """Compare an iteration with its prediction, predict the next one, and weigh what should run.

        ``values["evaluation_s"]``, where there, is the part of ``iteration_s`` that evaluations took.
        """
        config = self._spec.config
        self._first = iteration if self._first is None else self._first
        seats = self._scheduler.seats()
        now = arranged(seats)
        self._kinds |= {engine.workers[0]: engine.kind for engine in now.engines}
        alone = iteration == self._first or follows_evaluation(config, iteration)
        realised, predicted = realised_seconds(values, config, alone), self.predicted
        beside = config.run.eta > 0 and config.cluster.train_workers == 1
        self.forecast = self.forecast.after(taken(values, realised, self._kinds, beside=beside), now.by_kind)
        overlap = config.run.eta > 0 and not follows_evaluation(config, iteration + 1)
        self.predicted = self.forecast.expected(now.by_kind, self._prompts.lengths(iteration + 1), overlap)
        lengths = workload_of(values.get("trajectory_lengths", ()))
        ended = EndedIteration(iteration, seats, batch_of(values), lengths, realised.step_s, max(remaining, 0), overlap)
        predicted_s = None if predicted is None else predicted.step_s
        decision = self.replanning.after(ended, values, self.forecast, predicted_s)
        metrics = self._compared(realised, predicted) | decision_metrics(decision)
        measured_bytes = float(values.get("train_peak_bytes", 0))
        if self._shape is not None and lengths is not None and measured_bytes:
            on_cpu = not values.get("train_on_gpu")
            metrics |= compared_memory(config, self._shape, lengths, measured_bytes, on_cpu=on_cpu)
        self._write(iteration, metrics)

    def _compared(self, realised: RealisedStep, predicted: ExpectedStep | None) -> dict[str, float]:
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


def decision_metrics(decision: SplitDecision | None) -> dict[str, float]:
    """Metrics of a decision; none if nothing was weighed."""
    if decision is None:
        return {}
    found = {
        "plan/accepted": float(decision.considered.accepted),
        "plan/kv_demand": decision.now.kv_demand,
        "plan/context_tokens": decision.context_tokens,
    }
    return found | {"plan/proposed_step_s": decision.considered.proposed_step_s}


def workload_of(rows: Sequence[Lengths]) -> TrajectoryTotals | None:
    """The lengths of a batch's trajectories, for the planner; None if there is none."""
    if not rows:
        return None
    prompt, generated, observed, turns, tool_s = np.array(rows, float).T
    return TrajectoryTotals(prompt, np.maximum(generated, 1.0), observed, np.maximum(turns, 1.0), tool_s)


def follows_evaluation(config: RunConfig, iteration: int) -> bool:
    """Whether an evaluation comes between the iteration before and this one, so that nothing of it began earlier."""
    every = config.evaluation.every
    return every > 0 and iteration > 0 and iteration % every == 0


def realised_seconds(values: Mapping[str, Any], config: RunConfig, alone: bool = False) -> RealisedStep:
    """Seconds of rollout, training and step from an iteration's numbers, without evaluations.

    Rollout is what is neither training nor publishing: engines wait for both. Where steps overlap (eta >= 1) rollout counts as the
    whole step, except in an iteration with none before it to overlap with (``alone``).
    """
    step_s = float(values["iteration_s"]) - float(values.get("evaluation_s", 0.0))
    train_s = max(float(values.get("train_s", 0.0)), 1e-6)
    waits_s = train_s + float(values.get("publish_s", 0.0))
    rollout_s = step_s - waits_s if config.run.eta == 0 or alone else step_s
    return RealisedStep(max(rollout_s, 1e-6), train_s, step_s)


def taken(
    values: Mapping[str, Any], realised: RealisedStep, kinds: Mapping[str, str], *, beside: bool = False
) -> Taken:
    """An iteration as `libra.planner.step_forecast` learns from it; tokens of a worker that had left by its end have no kind.

    ``beside``: its version was published beside the next step, so that only what exceeds a step's training counts.
    """
    publish_s = float(values.get("publish_s", 0.0))
    tokens: Counter[str] = Counter()
    for worker, number in values["worker_tokens"].items():
        tokens[kinds.get(worker, "gone")] += number
    return Taken(
        realised.rollout_s,
        realised.training_s,
        max(0.0, publish_s - realised.training_s) if beside else publish_s,
        realised.step_s,
        tokens,
        [(float(chars), float(number)) for chars, number in values["question_tokens"]],
        [(float(chars), float(number)) for chars, number in values.get("trained_tokens", ())],
    )


def compared_memory(
    config: RunConfig, shape: ModelShape, workload: TrajectoryTotals, measured_bytes: float, *, on_cpu: bool
) -> dict[str, float]:
    """Metrics of an iteration: predicted and measured peak memory of its training step."""
    layout = replace(trainer_layout(config, workload), on_cpu=on_cpu, runtime_bytes=0.0)
    workers = config.cluster.train_workers
    predicted = sum(memory_parts_bytes(shape, workload.final_context_tokens, workers, layout).values())
    return {
        "plan/train_peak_bytes": measured_bytes,
        "plan/predicted_train_peak_bytes": predicted,
        "plan/train_peak_error_frac": predicted / measured_bytes - 1.0,
    }
