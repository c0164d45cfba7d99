"""Late rewards: the bias that RAC's correction leaves, in its authors' experiment and exactly, and what a run learns from them.

**Learning.** The quick start with rewards that come ``--delays`` versions late, and with a guess until then that is wrong for one
trajectory in four (`benchmarks.late_runs`): held-out reward at the end with ``trainer.late=correct``, beside runs whose rewards are
on time, ``--seeds`` of each. ``late_gap_se`` is the largest difference of means, in standard errors of that difference. The rewards
of the last batches come too late for such a run; with ``--same-rewards`` it takes as many more steps as they are late. ``--drop``
adds runs that count the guess alone. With ``--emulated`` runs are in one process and in emulated time (`benchmarks.late_loop`; no
Dask, no kill), ``--processes`` at once: a fraction of the seconds, the same whatever the machine's load is.

**A kill.** A run is killed with 20 rewards to come, which are delivered while nothing runs, is killed again in the step that takes
them, and resumed: ``applied_once`` counts the rewards that exactly one batch took.

**Bias.** It is that of the policy gradient on the table of RAC's authors (arXiv:2606.27580: 3 states, 2 actions, gamma 0.9; a fast
reward, and a slow one that comes 5, 20 or 50 steps later, tau 1000, no drift): the norm of the estimate's mean minus the gradient.
Three numbers for each delay:

sampled
    As they measure it, with their seeds: 3 x 1,000 trajectories of 50 steps. Its bias with the correction is below the noise of the
    estimate, which is printed beside it.
of 50 steps
    The expectation of the same estimator: what more trajectories would give. Cut at 50 steps, it has a bias of its own.
law
    The expectation without a horizon, with the correction (`libra.policy.late`) and the loss (`libra.train.losses`) that a run has.
    It is (1 - e^(-delay / tau)) times that without the correction, a ratio of 1 / (1 - e^(-delay / tau)): 200.5, 50.5 and 20.5.
    Also where the policy has moved since it sampled.

``python -m benchmarks.late --json``; figures ``mean_bias_reduction`` (sampled; the authors': 30.17, 29.42 and 84.05, mean 47.88),
``exact_law_error``, ``late_gap_se`` and ``applied_once``. ``--seeds 0`` leaves out the runs, of which there are seeds x 4; with
``--out FILE`` finished ones are kept in FILE and not run again.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.late_runs import PENDING, killed, learned
from benchmarks.report import QUICKSTART, Figure, command_parser, emit
from libra.config import load_config
from libra.policy.late import age_weight, correction
from libra.train.losses import ppo_loss

DELAYS = (5, 20, 50)
TAU = 1000.0
SEEDS = (0, 1, 2)
TRAJECTORIES, STEPS = 1000, 50
PUBLISHED = (30.17, 29.42, 84.05)

Array = NDArray[np.float64]
Run = tuple[Any, ...]
"""Emulated or real, delay, `trainer.late`, seed, and further settings."""


@dataclass(frozen=True)
class Table:
    """RAC's decision process and policy: S states, A actions.

    ``next_SAS`` are probabilities, ``fast_SA`` and ``slow_SA`` rewards whose sum counts, ``theta_SA`` the logits of the policy.
    """

    next_SAS: Array
    fast_SA: Array
    slow_SA: Array
    theta_SA: Array
    gamma: float = 0.9

    @classmethod
    def of_the_paper(cls) -> Table:
        """With the seeds of the authors' script."""
        rng = np.random.default_rng(1337)
        next_SAS = _softmax(rng.normal(size=(3, 2, 3)))
        fast_SA = rng.uniform(-0.5, 0.5, size=(3, 2))
        slow_SA = np.zeros((3, 2))
        slow_SA[0, 1] += 0.6
        slow_SA += rng.uniform(-0.3, 0.3, size=(3, 2))
        return cls(next_SAS, fast_SA, slow_SA, np.random.default_rng(7).normal(scale=0.3, size=(3, 2)))

    @property
    def policy_SA(self) -> Array:
        """Probability of each action."""
        return _softmax(self.theta_SA)

    @property
    def moves_SS(self) -> Array:
        """Probability of each next state under the policy."""
        return np.einsum("sa,sat->st", self.policy_SA, self.next_SAS)

    @property
    def visits_S(self) -> Array:
        """The stationary distribution."""
        states = len(self.theta_SA)
        square = np.vstack([self.moves_SS.T - np.eye(states), np.ones(states)])
        return np.asarray(np.linalg.lstsq(square, np.append(np.zeros(states), 1.0), rcond=None)[0])

    def q_SA(self, reward_SA: Array) -> Array:
        """Action values without a horizon."""
        here_S = (self.policy_SA * reward_SA).sum(1)
        value_S = np.linalg.solve(np.eye(len(here_S)) - self.gamma * self.moves_SS, here_S)
        return reward_SA + self.gamma * self.next_SAS @ value_S

    def gradient_SA(self, visits_S: Array, q_SA: Array) -> Array:
        """The policy gradient: sum over states and actions of visits x probability x value x gradient of the log-probability."""
        value_S1 = (self.policy_SA * q_SA).sum(1, keepdims=True)
        return visits_S[:, None] * self.policy_SA * (q_SA - value_S1)

    def of_steps_SA(self, reward_SA: Array, steps: int) -> Array:
        """Expectation of the estimate from trajectories of so many steps from any state, their returns cut at the end."""
        value_S, q_TSA = np.zeros(len(reward_SA)), []
        for _ in range(steps):
            q_TSA.append(reward_SA + self.gamma * self.next_SAS @ value_S)
            value_S = (self.policy_SA * q_TSA[-1]).sum(1)
        visits_S, total_SA = np.full(len(reward_SA), 1 / len(reward_SA)), np.zeros_like(reward_SA)
        for q_SA in reversed(q_TSA):
            total_SA += self.gradient_SA(visits_S, q_SA)
            visits_S = visits_S @ self.moves_SS
        return total_SA / steps


def sampled(table: Table, delay: int, seed: int, trajectories: int = TRAJECTORIES) -> tuple[Array, Array]:
    """The authors' estimate (N, S, A) of the gradient from each trajectory: without the slow reward, and with the correction."""
    rng = np.random.default_rng(seed * 10_007 + delay * 97)
    policy, following = _bounds(table.policy_SA), _bounds(table.next_SAS)
    at = np.empty((2, trajectories, STEPS), np.int64)
    for number in range(trajectories):
        state = int(rng.integers(0, len(policy)))
        draws = rng.random(2 * STEPS).tolist()  # what Generator.choice draws, one by one
        for step in range(STEPS):
            action = bisect_right(policy[state], draws[2 * step])
            at[:, number, step] = state, action
            state = bisect_right(following[state][action], draws[2 * step + 1])
    fast_NT, slow_NT = (_returns(reward_SA[at[0], at[1]], table.gamma) for reward_SA in (table.fast_SA, table.slow_SA))
    corrected_NT = fast_NT + correction(fast_NT, fast_NT + slow_NT, delay=delay, tau=TAU)
    return _score(table, at, fast_NT), _score(table, at, corrected_NT)


def of_the_loss_SA(table: Table, advantage_SA: Array, sampled_by_SA: Array) -> Array:
    """The expected gradient of a run's loss, of actions sampled by another policy in states visited as by the table's."""
    theta_SA = torch.tensor(table.theta_SA, requires_grad=True)
    logp_SA = torch.log_softmax(theta_SA, dim=1)
    old_SA, advantages = torch.tensor(np.log(sampled_by_SA)), torch.tensor(advantage_SA)
    loss_SA = ppo_loss(logp_SA, old_SA, advantages, clip_low=1.0, clip_high=9.0)
    weight_SA = torch.tensor(table.visits_S[:, None] * sampled_by_SA)
    (found,) = torch.autograd.grad((weight_SA * loss_SA).sum(), theta_SA)
    return -np.asarray(found.numpy())


def law_error(table: Table, delay: int, moved: float) -> float:
    """How far the bias is from (1 - w) times that without the correction; ``moved``: by how much logits differ from those that
    sampled the actions."""
    away_SA = np.random.default_rng(11).normal(scale=moved, size=table.theta_SA.shape)
    by_SA = _softmax(table.theta_SA + away_SA)
    fast_SA, both_SA = (table.q_SA(reward_SA) for reward_SA in (table.fast_SA, table.fast_SA + table.slow_SA))
    goal_SA = table.gradient_SA(table.visits_S, both_SA)
    late_SA = fast_SA + correction(fast_SA, both_SA, delay=delay, tau=TAU)
    bias = np.linalg.norm(of_the_loss_SA(table, late_SA, by_SA) - goal_SA)
    without = np.linalg.norm(of_the_loss_SA(table, fast_SA, by_SA) - goal_SA)
    return float(abs(bias - (1 - age_weight(delay, TAU)) * without))


def biases(table: Table, delay: int) -> dict[str, float]:
    """All numbers of one delay, printed."""
    both_SA = table.fast_SA + table.slow_SA
    aged_SA = table.fast_SA + age_weight(delay, TAU) * table.slow_SA
    goal_SA = table.gradient_SA(table.visits_S, table.q_SA(both_SA))

    def bias(of_SA: Array) -> float:
        return float(np.linalg.norm(of_SA - goal_SA))

    parts = [sampled(table, delay, seed) for seed in SEEDS]
    fast_NSA, late_NSA = (np.concatenate(each) for each in zip(*parts, strict=True))
    noise = float(np.sqrt(late_NSA.var(axis=0, ddof=1).sum() / len(late_NSA)))
    numbers = {
        "sampled": bias(fast_NSA.mean(0)) / bias(late_NSA.mean(0)),
        "of_steps": bias(table.of_steps_SA(table.fast_SA, STEPS)) / bias(table.of_steps_SA(aged_SA, STEPS)),
        "law": 1 / (1 - age_weight(delay, TAU)),
        "error": max(law_error(table, delay, moved) for moved in (0.0, 0.5)),
    }
    print(
        f"{delay} steps late: bias sampled {bias(fast_NSA.mean(0)):.5f} -> {bias(late_NSA.mean(0)):.5f} (noise {noise:.5f}), "
        f"{numbers['sampled']:.2f} times smaller; expected {numbers['of_steps']:.1f} times; without a horizon "
        f"{bias(table.gradient_SA(table.visits_S, table.q_SA(table.fast_SA))):.5f} -> "
        f"{bias(table.gradient_SA(table.visits_S, table.q_SA(aged_SA))):.5f}, {numbers['law']:.2f} times (law exact to "
        f"{numbers['error']:.1e})"
    )
    return numbers


def bias_figures() -> dict[str, Figure]:
    """The figures of the table."""
    table = Table.of_the_paper()
    found = {delay: biases(table, delay) for delay in DELAYS}
    figures = {
        f"bias_reduction_{delay}": Figure(found[delay]["sampled"], "ratio", "higher", goal=goal - 0.005)
        for delay, goal in zip(DELAYS, PUBLISHED, strict=True)
    }
    mean = float(np.mean([each["sampled"] for each in found.values()]))
    return {
        "mean_bias_reduction": Figure(mean, "ratio", "higher", goal=47.875),
        **figures,
        "exact_law_error": Figure(max(each["error"] for each in found.values()), "gradient", "lower", goal=1e-12),
    }


def learning_figures(
    seeds: int,
    delays: Sequence[int],
    overrides: Sequence[str],
    *,
    drop: bool,
    out: Path | None = None,
    same_rewards: bool = False,
    emulated: int = 0,
) -> dict[str, Figure]:
    """Held-out rewards of runs with late rewards beside those on time; those in ``out`` are read. ``emulated``: processes of runs
    in emulated time; 0: real runs."""
    systems = {"on_time": (0, "off")} | {f"late_{delay}": (delay, "correct") for delay in delays}
    if drop:
        systems |= {f"dropped_{delay}": (delay, "drop") for delay in delays}
    lines = out.read_text().splitlines() if out is not None and out.exists() else []
    kept: dict[Run, float] = {tuple(row["run"]): row["reward"] for row in map(json.loads, lines)}
    how, steps = "emulated" if emulated else "real", load_config(QUICKSTART, overrides).run.iterations
    runs: dict[tuple[str, int], Run] = {}
    for seed, (name, (delay, late)) in itertools.product(range(seeds), systems.items()):
        more = [f"run.iterations={steps + delay}"] if delay and same_rewards else []
        runs[name, seed] = (how, delay, late, seed, *overrides, *more)
    left = [run for run in runs.values() if run not in kept]  # in turns, so that all see the same machine
    for run, reward in zip(left, _emulated(left, emulated) if emulated else map(_real, left), strict=True):
        kept[run] = reward
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps({"run": run, "reward": reward}) + "\n")
    finals = {name: [kept[runs[name, seed]] for seed in range(seeds)] for name in systems}
    gaps = {name: gap_se(finals["on_time"], found) for name, found in finals.items() if name != "on_time"}
    for name, gap in gaps.items():
        print(f"{name}: {gap:+.2f} standard errors below on time")
    worst = max(gap for name, gap in gaps.items() if name.startswith("late_"))
    return {
        "late_gap_se": Figure(worst, "standard errors", "lower", goal=1.0),
        **{f"{name}_gap_se": Figure(gap, "standard errors", "lower") for name, gap in gaps.items()},
        **{f"{name}_reward": Figure(float(np.mean(found)), "reward", "higher") for name, found in finals.items()},
    }


def gap_se(first: Sequence[float], second: Sequence[float]) -> float:
    """How far the mean of ``second`` is below that of ``first``, in standard errors of the difference; 0 where both are all the
    same."""
    gap = float(np.mean(first) - np.mean(second))
    error = float(np.sqrt(np.var(first, ddof=1) / len(first) + np.var(second, ddof=1) / len(second)))
    return gap / max(error, 1e-9)


def kill_figures() -> dict[str, Figure]:
    """Rewards that were to come in a killed run, and that exactly one batch took."""
    with tempfile.TemporaryDirectory() as directory:
        times = killed(Path(directory))
    print(f"killed with {PENDING} rewards to come: {dict(Counter(times.values()))} (times applied: rewards)")
    return {"applied_once": Figure(sum(count == 1 for count in times.values()), "rewards", "higher", goal=PENDING)}


def _real(run: Run) -> float:
    _, delay, late, seed, *overrides = run
    with tempfile.TemporaryDirectory() as directory:
        return learned(Path(directory), delay, late, seed, overrides)


def _emulated(runs: Sequence[Run], processes: int) -> Iterator[float]:
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes
    fresh = multiprocessing.get_context("spawn")  # in a fork, torch would wait for threads that this process had
    with ProcessPoolExecutor(processes, fresh) as pool:
        yield from pool.map(_in_one_process, runs)


def _in_one_process(run: Run) -> float:
    from benchmarks import late_loop

    _, delay, late, seed, *overrides = run
    return late_loop.learned(delay, late, seed, overrides)


def _softmax(logits: Array) -> Array:
    odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(odds / odds.sum(axis=-1, keepdims=True))


def _bounds(probabilities: Array) -> Any:
    sums = probabilities.cumsum(-1)
    return (sums / sums[..., -1:]).tolist()


def _returns(reward_NT: Array, gamma: float) -> Array:
    return_NT, running_N = np.empty_like(reward_NT), np.zeros(len(reward_NT))
    for step in reversed(range(reward_NT.shape[1])):
        running_N = reward_NT[:, step] + gamma * running_N
        return_NT[:, step] = running_N
    return return_NT


def _score(table: Table, at: NDArray[np.int64], return_NT: Array) -> Array:
    """Mean over steps of return x gradient of the log-probability (N, S, A)."""
    trajectories, steps = return_NT.shape
    taken_NSA = np.zeros((trajectories, *table.theta_SA.shape))
    np.add.at(taken_NSA, (np.arange(trajectories)[:, None], at[0], at[1]), return_NT)
    return (taken_NSA - taken_NSA.sum(-1, keepdims=True) * table.policy_SA) / steps


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = command_parser("late", __doc__)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind; 0: none (default 5)")
    parser.add_argument("--delays", type=int, nargs="+", default=[1, 3, 5], help="in versions")
    parser.add_argument("--drop", action="store_true", help="also with trainer.late=drop")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="further settings of the runs"
    )
    parser.add_argument("--emulated", action="store_true", help="runs in one process each, in emulated time; no kill")
    parser.add_argument("--same-rewards", action="store_true", help="late runs take as many more steps")
    parser.add_argument("--processes", type=int, default=2, help="of --emulated")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    if options.seeds == 1:
        parser.error("--seeds 1: one run has no standard error; type --seeds 2 or more, or 0")
    if options.processes < 1:
        parser.error(f"--processes: got {options.processes}; at least 1")
    figures = bias_figures()
    if options.seeds:
        figures |= {} if options.emulated else kill_figures()
        figures |= learning_figures(
            options.seeds,
            options.delays,
            options.set,
            drop=options.drop,
            same_rewards=options.same_rewards,
            out=options.out,
            emulated=options.processes if options.emulated else 0,
        )
    emit("late", figures, arguments=arguments, as_json=options.json)


if __name__ == "__main__":
    main()
