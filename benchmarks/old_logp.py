"""Coverage, exactness and cost of ``trainer.old_logp=version`` at a staleness bound.

A replica of the quick start's model takes steps on batches of random tokens whose versions run from ``--eta`` behind to the newest,
as a full pipeline has them; half of the trajectories have tokens of two versions. Every version's weights are in a
`libra.weights.WeightStore`, as in a run.

``python -m benchmarks.old_logp --json``; figures ``coverage`` (share of tokens with an exact old log-probability), ``largest_gap``
(nats from scoring each trajectory alone under the version's weights; rounding alone in float32, so measure it with ``--dtype
float64``) and ``step_share`` (seconds of the passes over those of the whole step). A forward pass is about a third of a forward and
backward pass: where nearly all tokens are stale, as here, that is the share to expect.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Figure, command_parser, emit
from libra.config import resolve_model
from libra.scoring import score_alone
from libra.train import Replica, Sample, TrainSettings, sample_of
from libra.types import EndReason, Prompt, Trajectory, TrajectoryId
from libra.weights import WeightStore


def batch(step: int, eta: int, options: Any) -> list[Trajectory]:
    """Groups with one prompt each; the versions of a trajectory's tokens rise along it."""
    rng = np.random.default_rng([options.seed, step])
    made = []
    for group in range(options.groups):
        prompt = rng.integers(0, options.vocabulary, options.prompt_tokens)
        for index in range(options.group_size):
            generated = int(rng.integers(options.generated_tokens // 2, 3 * options.generated_tokens // 2))
            is_action = np.arange(len(prompt) + generated) >= len(prompt)
            first = max(0, step - int(rng.integers(0, eta + 1)))
            later = min(step, first + int(rng.integers(0, 2)))
            versions = np.where(np.arange(len(is_action)) < len(prompt) + generated // 2, first, later)
            versions = np.where(is_action, versions, -1).astype(np.int32)
            made.append(
                Trajectory(
                    trajectory_id=TrajectoryId(step, group, index),
                    prompt=Prompt("p", ()),
                    token_ids=np.concatenate([prompt, rng.integers(0, options.vocabulary, generated)]).astype(np.int32),
                    is_action=is_action,
                    behaviour_logprob=np.where(is_action, -4.0, 0).astype(np.float32),
                    weight_version=versions,
                    kv_version=versions.copy(),
                    turns=[],
                    end_reason=EndReason.ANSWERED,
                    reward=0.0,
                    advantage=float(rng.normal()),
                )
            )
    return made


def largest_gap(replica: Replica, store: WeightStore, samples: Sequence[Sample], model_dir: Path) -> float:
    """Largest difference in nats from each trajectory alone in a pass of another replica that holds the version."""
    other = Replica(model_dir, TrainSettings(), dtype=replica.dtype)
    gap = 0.0
    for version in sorted({int(v) for sample in samples for v in sample.version}):
        other.take_weights(store.read(version))
        for sample in samples:
            at = np.flatnonzero((sample.version == version) & ~sample.current)
            if len(at) and sample.proximal_logp is not None:
                ids = np.append(sample.token_ids, sample.target[-1])
                alone = score_alone(other.model, ids)[sample.action_at[at]]
                gap = max(gap, float(np.abs(alone - sample.proximal_logp[at]).max()))
    return gap


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = command_parser("old_logp", __doc__)
    parser.add_argument("--eta", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4, help="measured, after as many as --eta")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=60)
    parser.add_argument("--generated-tokens", type=int, default=100, help="mean")
    parser.add_argument("--vocabulary", type=int, default=100)
    parser.add_argument("--model", default="libra/tiny-arithmetic")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--minibatches", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    model_dir = Path(resolve_model(options.model))
    settings = TrainSettings(
        old_logp="version", correction="truncate", minibatches=options.minibatches, share_prompts=True
    )
    replica = Replica(model_dir, settings, dtype=options.dtype, threads=options.threads, device=options.device)
    reports, exact = [], []
    with tempfile.TemporaryDirectory() as directory:
        store = WeightStore(directory)
        replica.published = store.read
        for step in range(options.eta + options.steps):
            store.publish(step, replica.all_weights())
            store.drop(keep_last=options.eta + 1)
            trajectories = batch(step, options.eta, options)
            report = replica.step(trajectories, step)
            if step >= options.eta:
                reports.append(report)
                exact.append(report.exact_old_frac)
                print(
                    f"step {step}: {report.old_logp_s:.3f} s of {report.total_s:.3f} s, exact {report.exact_old_frac}"
                )
        samples = [sample_of(trajectory, step) for trajectory in trajectories]
        scored = replica.under_versions(samples, step)
        gap = largest_gap(replica, store, scored, model_dir)
    share = sum(report.old_logp_s for report in reports) / sum(report.total_s for report in reports)
    figures = {
        "coverage": Figure(min(exact), "share", "higher", goal=1.0),
        "largest_gap": Figure(gap, "nats", "lower", goal=1e-6),
        "step_share": Figure(share, "ratio", "lower", goal=0.15),
    }
    emit("old_logp", figures, arguments=arguments, as_json=options.json)


if __name__ == "__main__":
    main()
