"""Numbers of a batch: the spread of its rewards, its failures, its agents' sequences, and its late
rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from libra.config import RunConfig
from libra.policy.late_rewards import GuessWorth, WaitingGroup
from libra.store.run_records import read_batch_facts
from libra.types import EndReason, FailureClass, ToolStatus, Trajectory
from libra.untrusted import shown
from libra.worker.run_spec import RunFiles
from libra.worker.trajectory.trajectory_state import CONTEXT_FULL

ZERO_ADVANTAGE = 1e-6
"""Advantages up to this size count as 0: equal rewards leave rounding errors."""
MAX_CAUSE_CHARS = 200


def signal_numbers(trajectories: Sequence[Trajectory], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The spread of a batch's rewards, and why nothing can be learned from it.

    ``rows`` are the batch's facts, one a group, with ``advantages`` and ``trains`` of its members. Over
    groups with at least two valid members: ``reward_std``, ``reward_group_min`` and
    ``reward_group_max``, means of each group's standard deviation, lowest and highest reward (NaN
    without such a group), and ``frac_reward_zero_std``, the share with equal rewards.
    ``groups_without_signal``: groups of several members with fewer than two valid or only equal
    rewards. ``no_signal``: why no member has an advantage, empty if one has.
    """
    valid: dict[tuple[int, int], list[float]] = {}
    size: dict[tuple[int, int], int] = {}
    for member in trajectories:
        group = (member.trajectory_id.iteration, member.trajectory_id.group)
        size[group] = size.get(group, 0) + 1
        rewards = valid.setdefault(group, [])
        if member.failure.trains:
            rewards.append(member.reward)
    compared = [np.asarray(rewards) for rewards in valid.values() if len(rewards) > 1]
    equal = sum(bool(np.ptp(rewards) == 0) for rewards in compared)
    lone = sum(size[group] > 1 and len(rewards) < 2 for group, rewards in valid.items())

    def mean(of: list[float]) -> float:
        return float(np.mean(of)) if of else float("nan")

    return {
        "reward_std": mean([float(rewards.std()) for rewards in compared]),
        "reward_group_min": mean([float(rewards.min()) for rewards in compared]),
        "reward_group_max": mean([float(rewards.max()) for rewards in compared]),
        "frac_reward_zero_std": equal / len(compared) if compared else 0.0,
        "groups_without_signal": equal + lone,
        "no_signal": _cause(trajectories, rows, len(compared)),
    }


def _cause(trajectories: Sequence[Trajectory], rows: Sequence[Mapping[str, Any]], num_compared: int) -> str:
    if any(
        trains and abs(advantage) > ZERO_ADVANTAGE
        for row in rows
        for advantage, trains in zip(row["advantages"], row["trains"], strict=True)
    ):
        return ""
    trained = [member for member in trajectories if member.failure.trains]
    failed = next((member for member in trajectories if not member.failure.trains), None)
    cause = "" if failed is None else f"; the first failure: {failed.failure}: {_one_line(failed.failure_detail)}"
    if not trained:
        return f"none of {len(trajectories)} trajectories is valid{cause}"
    if not num_compared:
        return f"no group has two valid trajectories to compare{cause}"
    rewards = [member.reward for member in trained]
    low, high = min(rewards), max(rewards)
    if low == high:
        return f"all {len(trained)} rewards are {low:g}{_cut(trained)}{_refused(trained)}{cause}"
    return f"no group has rewards that differ ({low:g} to {high:g} between groups){cause}"


def _cut(members: Sequence[Trajectory]) -> str:
    cut = [member for member in members if member.end_reason is EndReason.LENGTH and member.turns]
    if not cut:
        return ""
    full = [member for member in cut if member.failure_detail == CONTEXT_FULL]
    limit, tokens = "max_new_tokens", max(int(member.turns[-1]["generated_tokens"]) for member in cut)
    if 2 * len(full) > len(cut):
        limit, tokens = "max_context_tokens", max(len(member.token_ids) for member in full)
    return f"; {len(cut)} of them were cut by rollout.{limit}: type a larger one, e.g. rollout.{limit}={2 * tokens}"


def _refused(members: Sequence[Trajectory]) -> str:
    named = [
        str(turn.get("tool", "")) for m in members for turn in m.turns if turn.get("status") == ToolStatus.MALFORMED
    ]
    if not named:
        return ""
    name = shown(max(set(named), key=named.count))
    what = f"no tool that is there, most often {name!r}" if name else "a tool in no form that can be read"
    return f"; {len(named)} turns called {what}"


def _one_line(text: str) -> str:
    line = " ".join(shown(text).split())
    return line if len(line) <= MAX_CAUSE_CHARS else f"{line[:MAX_CAUSE_CHARS]} ..."


def waiting_after(files: RunFiles, batch: int) -> list[WaitingGroup]:
    """The groups that batch ``batch`` left with rewards to come; none for a batch before the first."""
    return [
        WaitingGroup(iteration, group, trained, tuple(missing), {int(s): float(v) for s, v in given.items()}, *weight)
        for iteration, group, trained, missing, given, *weight in _late_facts(files, batch).get("waiting", ())
    ]


def worth_after(files: RunFiles, batch: int) -> GuessWorth:
    """The worth of guesses by batch ``batch``."""
    return GuessWorth(*_late_facts(files, batch).get("worth", ()))


def waiting_row(group: WaitingGroup) -> list[Any]:
    """A group as `waiting_after` reads it."""
    given = {str(sample): value for sample, value in group.given.items()}
    return [group.iteration, group.group, group.batch, list(group.missing), given, group.guess_weight]


def _late_facts(files: RunFiles, batch: int) -> dict[str, Any]:
    facts = read_batch_facts(files.batches_dir, batch) if batch >= 0 else {}
    late: dict[str, Any] = facts.get("late", {})
    return late


def agent_numbers(config: RunConfig, trajectories: Iterable[Trajectory]) -> dict[str, int]:
    """``agent_sequences`` of a batch, all sequences of its trajectories; nothing without an agent.

    It equals the number of trajectories where no conversation was edited, compacted or branched, and
    there were no sub-agents.
    """
    if not config.agent.given:
        return {}
    return {"agent_sequences": sum(1 + len(each.starts) for each in trajectories if each.turns)}


def failure_counts(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """The failures of a batch; every count is present in every iteration.

    ``failures/<class>``: members that ended so. ``resampled/<class>``: failed attempts that were
    followed by another one; ``resampled`` is their sum.
    """
    ended = Counter(member.failure for member in trajectories)
    again = Counter(name for member in trajectories if member.retried for name in member.retried.split(","))
    failed = [failure for failure in FailureClass if failure is not FailureClass.NONE]
    return {
        **{f"failures/{failure}": ended[failure] for failure in failed},
        **{f"resampled/{failure}": again[str(failure)] for failure in failed if not failure.trains},
        "resampled": again.total(),
    }
