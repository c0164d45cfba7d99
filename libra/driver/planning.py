"""Planning beside a run: after each iteration it says how long the next one will take, and weighs what would be better.

1. Each iteration's seconds are predicted before it begins, from what this run measured; the prediction is compared when it ends.
2. The run does not wait: what is to begin is submitted before an iteration ends, and changes are asked for, not waited for.
3. Every consideration is in the event log, accepted or not, and predicted against realised seconds are metrics.
4. Nothing is changed unless ``planner.apply`` says so; what is weighed is the same without it (`libra.driver.replanning`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from libra.config import RunConfig
from libra.driver.replanning import Replanning, RunCalls
from libra.driver.run_client import AskingRun
from libra.errors import ConfigError, ModelError
from libra.graph.batch_lengths import workload_of
from libra.graph.prompt_lengths import Questions
from libra.hardware import ModelShape, engine_seconds, load_shape
from libra.observe.metrics import read_metrics
from libra.planner import RealisedStep
from libra.planner.arrangement_loop import ArrangementLoop, Run, SplitDecision
from libra.planner.arrangements import Seat, arranged
from libra.planner.cost import Workload
from libra.planner.cost.training_cost import memory_parts_bytes
from libra.planner.from_config import DEFAULT_GPU, shape_of, trainer_layout
from libra.planner.measured_step import ExpectedStep, StepForecast, Taken
from libra.planner.replan import Rules
from libra.worker.run_spec import RunSpec

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)


class Calls(RunCalls, Protocol):
    """What planning asks of the scheduler."""

    def seats(self) -> list[Seat]:
        """The rollout workers that are there."""


class Planning:
    """The planner of one run.

    Parameters
    ----------
    spec : RunSpec
    calls : Calls
    write : callable
        Takes (iteration, metrics) of an iteration.
    tell : callable
        Takes (name, fields) of an event for the run's log; run and time are added there.
    """

    def __init__(
        self,
        spec: RunSpec,
        calls: Calls,
        write: Callable[[int, Mapping[str, float]], None],
        tell: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self._spec, self._calls, self._write = spec, calls, write
        self._kinds: dict[str, str] = {}  # of each worker's last engine
        self._questions = Questions(spec.make_environment(), spec.config.trainer.prompts)
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
            calls,
            ArrangementLoop(run_of(spec), Rules(first_cost_s=planner.change_cost_s)),
            tell,
            apply=planner.apply,
            boundaries={str(tp): tokens for tp, tokens in spec.config.policy.boundaries_tokens.items()},
        )

    def begin(self, contexts: Sequence[tuple[int, float]]) -> None:
        """Hear of earlier starts of the run, as (iteration, mean context at the end of its trajectories).

        Engines, slots, roles and boundaries are those of the configuration again; where these would run out of memory at the
        contexts that are to come, they are changed before the first iteration of this start, as `after` would.
        """
        if contexts:
            self.replanning.begin(contexts, self._calls.seats())

    def after(self, iteration: int, values: Mapping[str, Any], remaining: int) -> None:
        """Hear the numbers of an iteration: compare them, predict the next one, and weigh what should run.

        ``values["evaluation_s"]``, where there, is the part of ``iteration_s`` in which held-out questions were asked.
        """
        config = self._spec.config
        self._first = iteration if self._first is None else self._first
        seats = self._calls.seats()
        now = arranged(seats)
        self._kinds |= {engine.workers[0]: engine.kind for engine in now.engines}
        alone = iteration == self._first or follows_evaluation(config, iteration)
        realised, predicted = realised_seconds(values, config, alone), self.predicted
        self.forecast = self.forecast.after(taken(values, realised, self._kinds), now.by_kind)
        overlap = config.run.eta > 0 and not follows_evaluation(config, iteration + 1)
        self.predicted = self.forecast.expected(now.by_kind, self._questions.lengths(iteration + 1), overlap)
        lengths = workload_of(values.get("trajectory_lengths", ()))
        weighed = self.replanning.after(
            iteration,
            values,
            realised.step_s,
            seats,
            self.forecast,
            lengths,
            max(remaining, 0),
            overlap,
            None if predicted is None else predicted.step_s,
        )
        metrics = self._compared(realised, predicted) | weighed_metrics(weighed)
        measured_bytes = float(values.get("train_peak_bytes", 0))
        if self._shape is not None and lengths is not None and measured_bytes:
            on_cpu = not values.get("train_on_gpu")
            metrics |= compared_memory(config, self._shape, lengths, measured_bytes, on_cpu=on_cpu)
        self._write(iteration, metrics)

    def _compared(self, realised: RealisedStep, predicted: ExpectedStep | None) -> dict[str, float]:
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


def weighed_metrics(weighed: SplitDecision | None) -> dict[str, float]:
    """Metrics of a consideration; none where nothing was weighed."""
    if weighed is None:
        return {}
    found = {
        "plan/accepted": float(weighed.considered.accepted),
        "plan/kv_demand": weighed.now.kv_demand,
        "plan/context_tokens": weighed.context_tokens,
    }
    return found | {"plan/proposed_step_s": weighed.considered.proposed_step_s}


def plan_beside(
    client: Client,
    spec: RunSpec,
    write: Callable[[int, Mapping[str, float]], None],
    tell: Callable[[str, Mapping[str, Any]], None],
    first: int = 0,
) -> Planning:
    """The planner of a run that is started with iteration ``first``.

    ``write`` takes (iteration, metrics), ``tell`` (name, fields) of an event.
    """
    planning = Planning(spec, AskingRun(client, spec), write, tell)
    rows = [row for row in read_metrics(spec.directory) if row.get("trajectories")] if first else []
    planning.begin([(int(row["step"]), row["tokens"] / row["trajectories"]) for row in rows if row["step"] < first])
    return planning


def run_of(spec: RunSpec) -> Run:
    """What does not change while the run goes on, for `libra.planner.arrangement_loop`."""
    config = spec.config
    gpu = config.planner.gpu or DEFAULT_GPU
    known: dict[int, Any] = {}

    def seconds(tp: int) -> Any:
        """The cost model's engine of a degree; None where it has none."""
        if tp not in known:
            try:
                known[tp] = engine_seconds(gpu, shape_of(config), tp)
            except (ConfigError, ModelError) as error:
                logger.info("TP %d is weighed only once it was measured: %s", tp, error)
                known[tp] = None
        return known[tp]

    def may_have(engine: str, tp: int) -> str:
        if tp > 1 and engine != "vllm":
            return "rollout.engine=vllm, transformers engines have no tensor parallelism"
        if tp not in config.planner.tp:
            return f"planner.tp with {tp} in it, it is {list(config.planner.tp)}"
        try:
            shape_of(config).check_tp(tp)
        except ConfigError as error:
            return f"another model: {error}"
        except ModelError:
            pass  # a model whose sizes the planner does not know: the engine will say
        return ""

    def ratio(tp: int, other: int, sequences: float, context_tokens: float) -> float | None:
        one, two = seconds(tp), seconds(other)
        if one is None or two is None:
            return None
        at = max(round(sequences), 1)
        return float(two.decode_step_s(at, at * context_tokens) / one.decode_step_s(at, at * context_tokens))

    return Run(
        config.cluster.train_workers,
        config.run.eta,
        config.trainer.prompts * config.trainer.group_size,
        config.rollout.max_context_tokens,
        may_have,
        ratio,
        f"the cost model of {gpu}",
    )


def follows_evaluation(config: RunConfig, iteration: int) -> bool:
    """Whether held-out questions are asked between the iteration before and this one, so that nothing of it began earlier."""
    every = config.evaluation.every
    return every > 0 and iteration > 0 and iteration % every == 0


def realised_seconds(values: Mapping[str, Any], config: RunConfig, alone: bool = False) -> RealisedStep:
    """Seconds of rollout, training and step out of an iteration's numbers, evaluations left out of all.

    Rollout is what is neither training nor publishing: engines wait for both. Where steps overlap (eta >= 1) the longer of the two
    is what was seen of rollout, but for an iteration with none before it to overlap with (``alone``).
    """
    step_s = float(values["iteration_s"]) - float(values.get("evaluation_s", 0.0))
    train_s = max(float(values.get("train_s", 0.0)), 1e-6)
    waits_s = train_s + float(values.get("publish_s", 0.0))
    rollout_s = step_s - waits_s if config.run.eta == 0 or alone else step_s
    return RealisedStep(max(rollout_s, 1e-6), train_s, step_s)


def taken(values: Mapping[str, Any], realised: RealisedStep, kinds: Mapping[str, str]) -> Taken:
    """An iteration as `libra.planner.measured_step` hears of it; tokens of a worker that was gone at its end count with no kind."""
    tokens: Counter[str] = Counter()
    for worker, number in values["worker_tokens"].items():
        tokens[kinds.get(worker, "gone")] += number
    return Taken(
        realised.rollout_s,
        realised.training_s,
        float(values.get("publish_s", 0.0)),
        realised.step_s,
        tokens,
        [(float(chars), float(number)) for chars, number in values["question_tokens"]],
        [(float(chars), float(number)) for chars, number in values.get("trained_tokens", ())],
    )


def compared_memory(
    config: RunConfig, shape: ModelShape, workload: Workload, measured_bytes: float, *, on_cpu: bool
) -> dict[str, float]:
    """Metrics of an iteration: what its training step was predicted to hold at most, against what its fullest worker held."""
    layout = replace(trainer_layout(config, workload), on_cpu=on_cpu, runtime_bytes=0.0)
    workers = config.cluster.train_workers
    predicted = sum(memory_parts_bytes(shape, workload.final_context_tokens, workers, layout).values())
    return {
        "plan/train_peak_bytes": measured_bytes,
        "plan/predicted_train_peak_bytes": predicted,
        "plan/train_peak_error_frac": predicted / measured_bytes - 1.0,
    }
