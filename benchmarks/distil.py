"""On-policy distillation: the variance of its estimators, and what stale places cost.

**Variance.** A student and a teacher of the quick start's size (the student is the teacher with noise on its weights), and places
from what the student generates. In each of ``--runs`` runs the student draws m tokens per place, and a run's trainer estimates
the gradient of the reverse divergence from them (fresh advantages). The variance is the mean squared distance of the runs'
gradients from their mean; ``variance_ratio_m64`` is that with m = 64 over that with one token, at the same places. The law is
1 / 64 = 0.0156; AsyncOPD (arXiv:2606.24143) measured 0.0149. ``bias_standard_errors`` is the distance of the mean gradient from
the exact one: about 1 if the estimate has no bias.

**Staleness.** The student learns for ``--steps`` steps from places that it generated ``--lag`` versions before, or with its
present weights, ``--seeds`` runs of each: by the forward divergence of a top-k, and by the reverse one with fresh advantages of m
tokens. Engine, teacher and trainer are those of a run; the lag is exact. Then the exact divergence over the whole vocabulary, at
places that the final student generates, is compared. ``kl_lag8_over_lag0`` is the larger of the two ratios of means.

``python -m benchmarks.distil --json``
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.report import Figure, command_parser, emit
from libra.config import resolve_model
from libra.config.distil import DistilSection
from libra.envs.tool_arithmetic import ToolArithmetic
from libra.rollout import load_chat_format
from libra.rollout.attention import SLOT_ATTENTION, register
from libra.rollout.slot_batch import SlotBatch
from libra.rollout.slot_table import Job
from libra.rollout.weight_loading import load_causal_lm
from libra.train import Replica, TrainSettings, sample_of
from libra.train.step_report import Tally
from libra.train.teacher_model import Scoring, TeacherModel
from libra.types import EndReason, Prompt, Taught, Trajectory, TrajectoryId, TurnRequest

MODEL = "libra/tiny-arithmetic"
GOAL_VARIANCE, GOAL_KL = 0.019, 1.1
LEAST_VARIANCE = 0.012
"""Less would not be the variance of 64 independent tokens."""


@dataclass(frozen=True)
class Sizes:
    """Trajectories of a step, tokens of each, and the weights' relative noise by which a student begins away from its teacher."""

    sequences: int
    tokens: int
    noise: float


class Student:
    """A replica in training, an engine that generates with one of its versions, and the versions so far."""

    def __init__(self, settings: TrainSettings, sizes: Sizes, seed: int) -> None:
        directory = Path(resolve_model(MODEL))
        self.replica, self.sizes, self.seed = Replica(directory, settings, threads=1, seed=seed), sizes, seed
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.replica.model.parameters():
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_(sizes.noise * weight.std() * noise) if weight.ndim == 2 else None
        self.engine = load_causal_lm(directory, "float32", SLOT_ATTENTION)
        self.versions = [self._weights()]
        environment = ToolArithmetic(seed=seed)
        chat = load_chat_format(directory, environment.tool_schemas, tool_format=environment.tool_format)
        self._prompt = lambda index: chat.prompt_ids(list(environment.prompt("train", index).messages))

    def _weights(self) -> dict[str, Tensor]:
        return copy.deepcopy({name: tensor.detach() for name, tensor in self.replica.model.state_dict().items()})

    def generated(self, version: int, draws: int, first: int) -> list[Trajectory]:
        """What weights ``version`` generate for the prompts from ``first`` on, four samples each."""
        self.engine.load_state_dict(self.versions[version])
        sizes = self.sizes
        batch = SlotBatch(self.engine, slots=sizes.sequences, max_context_tokens=400, version=version)
        made = []
        for number in range(sizes.sequences):
            tid = TrajectoryId(first, number // 4, number % 4)
            seed = int(np.random.default_rng([self.seed, first, number]).integers(2**62))
            request = TurnRequest(
                str(tid),
                0,
                self._prompt(first * sizes.sequences // 4 + number // 4),
                sizes.tokens,
                seed=seed,
                draws=draws,
            )
            batch.submit(Job(number + 1, request, 0.0))
        while batch.has_work:
            for job, output in batch.step():
                ids = np.concatenate([job.request.context_ids, output.token_ids]).astype(np.int32)
                is_action = np.arange(len(ids)) >= len(job.request.context_ids)
                logp, versions = np.zeros(len(ids), np.float32), np.full(len(ids), -1, np.int32)
                logp[is_action], versions[is_action] = output.logprobs, version
                made.append(
                    Trajectory(
                        TrajectoryId(first, *(int(part) for part in job.request.trajectory_id.split("-")[2:])),
                        Prompt("p", ()),
                        ids, is_action, logp, versions, versions.copy(), [], EndReason.ANSWERED,
                        reward=0.0, drawn=output.drawn,
                    )
                )  # fmt: skip
        return sorted(made, key=lambda each: each.trajectory_id)

    def learn(self, teacher: TeacherModel, steps: int, lag: int, draws: int) -> None:
        """Take ``steps`` steps on what weights ``lag`` versions before generated."""
        for step in range(steps):
            batch = self.generated(max(0, step - lag), draws, first=step)
            for number, one in enumerate(batch):
                one.taught = teacher.score(one, np.random.default_rng([self.seed, step, number]))
            self.replica.step(batch, step)
            self.versions.append(self._weights())


def logp_at(model: Any, one: Trajectory) -> Tensor:
    """Log-probabilities of the whole vocabulary at each generated token (A, V)."""
    where = np.flatnonzero(one.is_action)
    ids_1T = torch.from_numpy(one.token_ids[: where[-1]].astype(np.int64))[None]
    with torch.no_grad():
        return model(input_ids=ids_1T).logits[0, torch.from_numpy(where - 1)].log_softmax(-1)


def exact_divergence(student: Student, teacher: TeacherModel, direction: str) -> float:
    """Mean over places that the student generates with its present weights, of questions that it was not asked, in nats."""
    total, places = 0.0, 0
    for first in range(10_000, 10_004):
        for one in student.generated(len(student.versions) - 1, 0, first):
            p_AV, q_AV = logp_at(student.replica.model, one), logp_at(teacher.model, one)
            weight_AV, gap_AV = (q_AV.exp(), q_AV - p_AV) if direction == "forward" else (p_AV.exp(), p_AV - q_AV)
            total, places = total + float((weight_AV * gap_AV).sum()), places + len(p_AV)
    return total / places


def teacher_for(section: DistilSection) -> TeacherModel:
    """The model that ships, as a teacher."""
    directory = Path(resolve_model(MODEL))
    vocabulary = Replica(directory, TrainSettings(lr=0.0)).model.config.vocab_size
    return TeacherModel.load(directory, Scoring(section, 1.0, int(vocabulary), 1024))


def settings_for(direction: str, lr: float) -> TrainSettings:
    """Of a replica that learns from its teacher alone."""
    return TrainSettings(algorithm="opd", lr=lr, distil={"divergence": direction}, max_row_tokens=1024)


def gradients(
    student: Student, teacher: TeacherModel, places: list[Trajectory], m: int, runs: int
) -> NDArray[np.float64]:
    """The estimated gradient of each run (runs, parameters), with tokens drawn anew by the student."""
    known = [(logp_at(student.replica.model, one), logp_at(teacher.model, one)) for one in places]
    found = []
    for run in range(runs):
        generator = torch.Generator().manual_seed(1000 * run + m)
        for one, (old_AV, teacher_AV) in zip(places, known, strict=True):
            columns_AK = torch.multinomial(old_AV.exp(), m, replacement=True, generator=generator)
            logp_AK, old_AK = teacher_AV.gather(1, columns_AK).numpy(), old_AV.gather(1, columns_AK).numpy()
            one.taught = Taught(columns_AK.int().numpy(), logp_AK, logp_AK[:, 0], None, old_AK)
        found.append(gradient_of(student, places))
    return np.stack(found)


def gradient_of(student: Student, places: list[Trajectory]) -> NDArray[np.float64]:
    """The gradient of a step at ``places``, before it is clipped (parameters,)."""
    gradient = student.replica.gradient
    parameters = list(student.replica.parameters().values())
    for parameter in parameters:
        parameter.grad = None
    weight = gradient.accumulate([sample_of(one, 1) for one in places], 1, Tally())
    flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]) / weight
    return flat.double().numpy()


def variance(options: Any, sizes: Sizes) -> tuple[float, float]:
    """Variance of the estimate with 64 tokens over that with one, and the bias of the former in standard errors."""
    section = DistilSection(teacher=MODEL, divergence="reverse", top_k=64)
    teacher, student = teacher_for(section), Student(settings_for("reverse", options.lr), sizes, seed=0)
    places = student.generated(0, 0, first=1)[: options.places]
    everything = student.replica.model.config.vocab_size
    one, many = (gradients(student, teacher, places, m, options.runs) for m in (1, 64))
    for each in places:  # a top-k of all tokens is exact
        q_AV = logp_at(teacher.model, each).numpy()
        ids_AV = np.broadcast_to(np.arange(everything, dtype=np.int32), q_AV.shape).copy()
        each.taught = Taught(ids_AV, q_AV, q_AV[:, 0], np.full(len(q_AV), -np.inf, np.float32))
    exact = gradient_of(student, places)
    spread_1, spread_64 = (float(each.var(axis=0, ddof=1).sum()) for each in (one, many))
    bias = float(np.linalg.norm(many.mean(0) - exact)) / (spread_64 / options.runs) ** 0.5
    ratio = spread_64 / spread_1
    print(
        f"variance of the gradient over {options.runs} runs: {spread_1:.3g} with one token per place, {spread_64:.3g} with 64",
        end="; ",
    )
    print(
        f"ratio {ratio:.5f}; the mean of the latter is {bias:.2f} standard errors from the exact gradient", flush=True
    )
    return ratio, bias


def staleness(options: Any, sizes: Sizes) -> float:
    """The largest ratio of final divergences, at a lag over without, of the two ways to distil."""
    ways = (
        ("forward, top-k", DistilSection(teacher=MODEL, top_k=options.top_k), 0),
        (
            "reverse, fresh advantages",
            DistilSection(teacher=MODEL, divergence="reverse", estimator="sampled", samples=options.samples),
            options.samples - 1,
        ),
    )
    ratios = []
    for name, section, draws in ways:
        teacher, means = teacher_for(section), {}
        for lag in (0, options.lag):
            finals = []
            for seed in range(options.seeds):
                student = Student(settings_for(section.divergence, options.lr), sizes, seed)
                before = exact_divergence(student, teacher, section.divergence)
                student.learn(teacher, options.steps, lag, draws)
                finals.append(exact_divergence(student, teacher, section.divergence))
                print(f"{name}, lag {lag}, seed {seed}: {before:.4f} nats before, {finals[-1]:.4f} after", flush=True)
            means[lag] = float(np.mean(finals))
        ratios.append(means[options.lag] / means[0])
        print(f"{name}: lag {options.lag} over lag 0: {ratios[-1]:.3f}", flush=True)
    return max(ratios)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = command_parser("distil", __doc__)
    parser.add_argument("--runs", type=int, default=60, help="runs whose gradients are compared")
    parser.add_argument("--places", type=int, default=16, help="trajectories whose tokens are those runs' places")
    parser.add_argument("--lag", type=int, default=8, help="versions")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=32, help="trajectories of a step")
    parser.add_argument("--tokens", type=int, default=24, help="most of one trajectory")
    parser.add_argument("--top-k", type=int, default=16)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument(
        "--noise", type=float, default=0.3, help="of the student's first weights, relative to their spread"
    )
    parser.add_argument("--lr", type=float, default=3e-4)
    options = parser.parse_args(arguments)
    for name in ("runs", "places", "lag", "steps", "seeds", "sequences", "tokens", "top_k", "samples"):
        if getattr(options, name) < (2 if name == "runs" else 1):
            typed = name.replace("_", "-")
            parser.error(
                f"--{typed}: got {getattr(options, name)}; type --{typed} {2 if name == 'runs' else 1} or more"
            )
    torch.set_num_threads(1)
    register()
    sizes = Sizes(options.sequences, options.tokens, options.noise)
    ratio, bias = variance(options, sizes)
    if ratio < LEAST_VARIANCE:
        print(f"{ratio:.5f} is less than 64 independent tokens can have ({LEAST_VARIANCE}); something is drawn twice")
    figures = {
        "variance_ratio_m64": Figure(ratio, "ratio", "lower", goal=GOAL_VARIANCE),
        "bias_standard_errors": Figure(bias, "ratio", "lower"),
        f"kl_lag{options.lag}_over_lag0": Figure(staleness(options, sizes), "ratio", "lower", goal=GOAL_KL),
    }
    emit("distil", figures, arguments=arguments, as_json=options.json)


if __name__ == "__main__":
    main()
