"""Late rewards: the bias that RAC's correction leaves, in its authors' experiment and exactly, and
what a run learns from them.

**Learning.** The quick start with rewards that come ``--delays`` versions late, and with a guess
until then that is wrong for one trajectory in four (`benchmarks.learning.late_runs`), beside runs
whose rewards are on time, ``--seeds`` of each. ``late_gap_se``: the largest difference of mean
held-out rewards, in standard errors of that difference.

**A kill.** A run is killed with 20 rewards to come, which are delivered while nothing runs, is
killed again in the step that takes them, and resumed: ``applied_once`` counts the rewards that
exactly one batch took.

**Bias** of the policy gradient on the table of RAC's authors (arXiv:2606.27580: 3 states, 2
actions, gamma 0.9; a fast reward, and a slow one that comes 5, 20 or 50 steps later, tau 1000): the
norm of the estimate's mean minus the gradient, for each delay

* sampled as they do, with their seeds: 3 x 1,000 trajectories of 50 steps (``mean_bias_reduction``;
  the authors' is 47.88). With the correction it is below the noise of the estimate, which is
  printed beside it;
* without a horizon, with the correction and the loss of a run: exactly 1 - e^(-delay / tau) of that
  without the correction (``exact_law_error``), also where the policy has moved since it sampled.
"""

from __future__ import annotations

import itertools
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.learning.late_runs import PENDING, killed, learned
from benchmarks.report import Figure, command_parser, emit, gap_se
from libra.policy.late_rewards import age_weight, correction
from libra.train.losses import ppo_loss

DELAYS = (5, 20, 50)
TAU = 1000.0
SEEDS = (0, 1, 2)
TRAJECTORIES, STEPS = 1000, 50
PUBLISHED = (30.17, 29.42, 84.05)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Table:
    """RAC's decision process and policy with S states and A actions.

    ``next_SAS`` are probabilities, ``fast_SA + slow_SA`` rewards, ``theta_SA`` the policy's logits.
    """

    next_SAS: Array
    fast_SA: Array
    slow_SA: Array
    theta_SA: Array
    gamma: float = 0.9

    @classmethod
    def of_the_paper(cls) -> Table:
        rng = np.random.default_rng(1337)
        next_SAS = _softmax(rng.normal(size=(3, 2, 3)))
        fast_SA = rng.uniform(-0.5, 0.5, size=(3, 2))
        slow_SA = np.zeros((3, 2))
        slow_SA[0, 1] += 0.6
        slow_SA += rng.uniform(-0.3, 0.3, size=(3, 2))
        return cls(next_SAS, fast_SA, slow_SA, np.random.default_rng(7).normal(scale=0.3, size=(3, 2)))

    @property
    def policy_SA(self) -> Array:
        return _softmax(self.theta_SA)

    @property
    def moves_SS(self) -> Array:
        return np.einsum("sa,sat->st", self.policy_SA, self.next_SAS)

    @property
    def visits_S(self) -> Array:
        states = len(self.theta_SA)
        square = np.vstack([self.moves_SS.T - np.eye(states), np.ones(states)])
        return np.asarray(np.linalg.lstsq(square, np.append(np.zeros(states), 1.0), rcond=None)[0])

    def q_SA(self, reward_SA: Array) -> Array:
        here_S = (self.policy_SA * reward_SA).sum(1)
        value_S = np.linalg.solve(np.eye(len(here_S)) - self.gamma * self.moves_SS, here_S)
        return reward_SA + self.gamma * self.next_SAS @ value_S

    def gradient_SA(self, visits_S: Array, q_SA: Array) -> Array:
        """The policy gradient: sum of visits x probability x value x gradient of the
        log-probability."""
        value_S1 = (self.policy_SA * q_SA).sum(1, keepdims=True)
        return visits_S[:, None] * self.policy_SA * (q_SA - value_S1)


def sampled(table: Table, delay: int, seed: int, trajectories: int = TRAJECTORIES) -> tuple[Array, Array]:
    """The authors' estimates (N, S, A) of the gradient: without the slow reward, and corrected."""
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
    """The expected gradient of a run's loss, with actions sampled by another policy."""
    theta_SA = torch.tensor(table.theta_SA, requires_grad=True)
    logp_SA = torch.log_softmax(theta_SA, dim=1)
    old_SA, advantages = torch.tensor(np.log(sampled_by_SA)), torch.tensor(advantage_SA)
    loss_SA = ppo_loss(logp_SA, old_SA, advantages, clip_low=1.0, clip_high=9.0)
    weight_SA = torch.tensor(table.visits_S[:, None] * sampled_by_SA)
    (found,) = torch.autograd.grad((weight_SA * loss_SA).sum(), theta_SA)
    return -np.asarray(found.numpy())


def law_error(table: Table, delay: int, moved: float) -> float:
    """Distance of the bias from (1 - w) times the uncorrected one; ``moved`` shifts the sampling
    logits."""
    away_SA = np.random.default_rng(11).normal(scale=moved, size=table.theta_SA.shape)
    by_SA = _softmax(table.theta_SA + away_SA)
    fast_SA, both_SA = (table.q_SA(reward_SA) for reward_SA in (table.fast_SA, table.fast_SA + table.slow_SA))
    goal_SA = table.gradient_SA(table.visits_S, both_SA)
    late_SA = fast_SA + correction(fast_SA, both_SA, delay=delay, tau=TAU)
    bias = np.linalg.norm(of_the_loss_SA(table, late_SA, by_SA) - goal_SA)
    without = np.linalg.norm(of_the_loss_SA(table, fast_SA, by_SA) - goal_SA)
    return float(abs(bias - (1 - age_weight(delay, TAU)) * without))


def bias_figures() -> dict[str, Figure]:
    table, reductions, errors, figures = Table.of_the_paper(), list[float](), list[float](), dict[str, Figure]()
    goal_SA = table.gradient_SA(table.visits_S, table.q_SA(table.fast_SA + table.slow_SA))
    for delay, published in zip(DELAYS, PUBLISHED, strict=True):
        parts = [sampled(table, delay, seed) for seed in SEEDS]
        fast_NSA, late_NSA = (np.concatenate(each) for each in zip(*parts, strict=True))
        noise = float(np.sqrt(late_NSA.var(axis=0, ddof=1).sum() / len(late_NSA)))
        before, after = (float(np.linalg.norm(each.mean(0) - goal_SA)) for each in (fast_NSA, late_NSA))
        reductions.append(before / after)
        errors += [law_error(table, delay, moved) for moved in (0.0, 0.5)]
        print(
            f"{delay} steps late: bias sampled {before:.5f} -> {after:.5f} (noise {noise:.5f}), {before / after:.2f} times "
            f"smaller; without a horizon {1 / (1 - age_weight(delay, TAU)):.2f} times (law exact to {errors[-1]:.1e})"
        )
        figures[f"bias_reduction_{delay}"] = Figure(before / after, "ratio", "higher", goal=published - 0.005)
    figures["mean_bias_reduction"] = Figure(float(np.mean(reductions)), "ratio", "higher", goal=47.875)
    return figures | {"exact_law_error": Figure(max(errors), "gradient", "lower", goal=1e-12)}


def learning_figures(seeds: int, delays: Sequence[int], overrides: Sequence[str]) -> dict[str, Figure]:
    systems = {"on_time": (0, "off")} | {f"late_{delay}": (delay, "correct") for delay in delays}
    finals: dict[str, list[float]] = {name: [] for name in systems}
    for seed, (name, (delay, late)) in itertools.product(range(seeds), systems.items()):
        with tempfile.TemporaryDirectory() as directory:
            finals[name].append(learned(Path(directory), delay, late, seed, overrides))
    gaps = {name: gap_se(finals["on_time"], found) for name, found in finals.items() if name != "on_time"}
    return {
        "late_gap_se": Figure(max(gaps.values()), "standard errors", "lower", goal=1.0),
        **{f"{name}_gap_se": Figure(gap, "standard errors", "lower") for name, gap in gaps.items()},
        **{f"{name}_reward": Figure(float(np.mean(found)), "reward", "higher") for name, found in finals.items()},
    }


def kill_figures() -> dict[str, Figure]:
    with tempfile.TemporaryDirectory() as directory:
        times = killed(Path(directory))
    print(f"killed with {PENDING} rewards to come: {dict(Counter(times.values()))} (times applied: rewards)")
    return {"applied_once": Figure(sum(count == 1 for count in times.values()), "rewards", "higher", goal=PENDING)}


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
    trajectories, steps = return_NT.shape
    taken_NSA = np.zeros((trajectories, *table.theta_SA.shape))
    np.add.at(taken_NSA, (np.arange(trajectories)[:, None], at[0], at[1]), return_NT)
    return (taken_NSA - taken_NSA.sum(-1, keepdims=True) * table.policy_SA) / steps


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("late", __doc__)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind; 0: none (default 5)")
    parser.add_argument("--delays", type=int, nargs="+", default=[1, 3, 5], help="in versions")
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="settings of the runs")
    options = parser.parse_args(arguments)
    if options.seeds == 1:
        parser.error("--seeds 1: one run has no standard error; type --seeds 2 or more, or 0")
    figures = bias_figures()
    if options.seeds:
        figures |= kill_figures() | learning_figures(options.seeds, options.delays, options.set)
    emit("late", figures, arguments=arguments, as_json=options.json)
