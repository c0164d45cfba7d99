"""Metrics of a batch that need no training step, and trajectory lengths for the planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from libra.config import RunConfig
from libra.policy import Verdict
from libra.policy.late_rewards import GuessWorth
from libra.types import EndReason, FailureClass, Prompt, ToolStatus, Trajectory
from libra.untrusted import shown
from libra.worker.training.batch_rows import without_stale
from libra.worker.trajectory.trajectory_state import CONTEXT_FULL

Groups = Sequence[Sequence[Trajectory]]
BatchRows = Sequence[Mapping[str, Any]]
"""The facts of a batch, one row a group."""
Lengths = tuple[int, int, int, int, float]
"""Tokens of prompt, generated and observed; turns; seconds with tools."""

NO_SIGNAL, NOT_NEEDED = "no signal", "not needed"
"""Why a group stands by (``spare`` of its row)."""
ZERO_ADVANTAGE = 1e-6
"""Advantages up to this size count as 0: equal rewards leave rounding errors."""
MAX_CAUSE_CHARS = 200


def numbers_of(config: RunConfig, batch: int, groups: Groups, facts: Mapping[str, Any]) -> dict[str, Any]:
    """All metrics of a batch, with committed facts ``facts``, that need no training step."""
    rows: BatchRows = facts["groups"]
    numbers = batch_stats(groups, rows, batch) | spare_numbers(rows, config.trainer.train_prompts)
    numbers |= late_numbers(facts) | taught_numbers(rows)
    if config.agent.given:
        numbers["agent_sequences"] = sum(1 + len(each.starts) for group in groups for each in group if each.turns)
    return numbers


def batch_stats(groups: Groups, rows: BatchRows, batch: int) -> dict[str, Any]:
    """Rewards, failures, token counts and lags (versions) of a batch."""
    members, lag = [member for group in groups for member in group], lags(groups, rows, batch)
    trained = [member for member in members if member.failure.trains]
    late = sum("over_age" in row for row in rows)
    return {
        "reward": float(np.mean([t.reward for t in trained])) if trained else float("nan"),
        "trajectories": len(members),
        "failures": sum(t.failure is not FailureClass.NONE for t in members),
        "left_out": len(members) - len(trained),
        **failure_counts(members),
        **signal_numbers(members, rows),
        "generated_tokens": int(sum(t.num_action_tokens for t in members)),
        "tokens": int(sum(len(t.token_ids) for t in members)),
        "turns": int(sum(len(t.turns) for t in members)),
        "max_turns": max((len(t.turns) for t in members), default=0),
        "length_ends_frac": float(np.mean([t.end_reason is EndReason.LENGTH for t in members])),
        "lag": float(lag.mean()) if lag.size else 0.0,
        "lag_max": int(lag.max()) if lag.size else 0,
    } | ({"over_age": late} if late else {})


def lags(groups: Groups, rows: BatchRows, batch: int) -> np.ndarray:
    """Lag in versions of every generated token that may train; excludes tokens dropped for age."""
    parts = [np.zeros(0, np.int32)]
    for group, row in zip(groups, rows, strict=True):
        if row.get("over_age") != Verdict.DROP and "spare" not in row:
            kept = [without_stale(t, row) for t in group if t.failure.trains]
            parts += [batch - t.weight_version[t.is_action] for t in kept]
    return np.concatenate(parts)


def signal_numbers(trajectories: Sequence[Trajectory], rows: BatchRows) -> dict[str, Any]:
    """The spread of a batch's rewards, and the reason if the batch has no learning signal.

    ``rows`` are the batch's facts, one per group, with ``advantages`` and ``trains`` of its
    members. ``reward_std``, ``reward_group_min`` and ``reward_group_max`` are means over groups
    with at least two valid members of each group's standard deviation, lowest and highest reward
    (NaN without such groups). ``frac_reward_zero_std`` is the fraction of these groups whose
    rewards are all equal. ``groups_without_signal`` counts groups of several members with fewer
    than two valid rewards or only equal ones. ``no_signal`` explains why no member has an
    advantage; "" if one has.
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


def _cause(trajectories: Sequence[Trajectory], rows: BatchRows, num_compared: int) -> str:
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


def failure_counts(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """``failures/<class>``: ended members; ``resampled/<class>``: retried attempts; their sum."""
    ended = Counter(member.failure for member in trajectories)
    again = Counter(name for member in trajectories if member.retried for name in member.retried.split(","))
    failed = [failure for failure in FailureClass if failure is not FailureClass.NONE]
    return {
        **{f"failures/{failure}": ended[failure] for failure in failed},
        **{f"resampled/{failure}": again[str(failure)] for failure in failed if not failure.trains},
        "resampled": again.total(),
    }


def spare_numbers(rows: BatchRows, most: int | None) -> dict[str, int]:
    """Metrics of ``trainer.train_prompts``; empty if ``most`` is None."""
    if most is None:
        return {}
    reasons = [row.get("spare") for row in rows]
    return {
        "groups_trained": reasons.count(None),
        "groups_replaced": sum(reason is None for reason in reasons[most:]),
        "groups_spare": reasons.count(NOT_NEEDED),
    }


def late_numbers(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of late rewards; empty with ``trainer.late=off``."""
    if (late := facts.get("late")) is None:
        return {}
    ages = [age for *_, age in late["came"]]
    return ({"no_signal": ""} if late["rows"] else {}) | {
        "late_came": len(ages),
        "late_delay": float(np.mean(ages)) if ages else 0.0,
        "late_waiting": sum(len(missing) for _, _, _, missing, _, _ in late["waiting"]),
        "late_dropped": len(late["dropped"]),
        "late_guess_worth": GuessWorth(*late["worth"]).slope,
    }


def taught_numbers(rows: BatchRows) -> dict[str, Any]:
    """``late_taught``: groups that the teacher has not scored; empty without a teacher."""
    if not any("taught" in row for row in rows):
        return {}
    learns = {"no_signal": ""} if any(row["taught"] for row in rows) else {}
    return learns | {"late_taught": sum(not row["taught"] and "spare" not in row for row in rows)}


def question_chars(prompt: Prompt) -> int:
    return sum(len(message["content"]) for message in prompt.messages)


def lengths_of(trajectories: Iterable[Trajectory]) -> list[Lengths]:
    found = []
    for turns in (each.turns for each in trajectories if each.turns):
        generated, observed, tool_s = (
            sum(turn[name] for turn in turns) for name in ("generated_tokens", "observation_tokens", "tool_s")
        )
        prompt = int(turns[0]["prompt_tokens"])
        found.append((prompt, int(generated), int(observed), len(turns), round(float(tool_s), 6)))
    return found


def generated_for(groups: Groups, rows: BatchRows) -> dict[str, Any]:
    """Tokens by worker and lengths of a batch, for the planner.

    ``question_tokens`` pairs the characters of each nonempty group's prompt with its generated
    tokens; ``trained_tokens`` pairs them with all tokens of members that have a gradient.
    """
    members = [member for group in groups for member in group]
    by_worker: Counter[str] = Counter()
    for turn in (turn for member in members for turn in member.turns):
        by_worker[turn["worker"]] += int(turn["generated_tokens"])
    generated, trained = [], []
    for group, row in zip(groups, rows, strict=True):
        if group:
            chars = question_chars(group[0].prompt)
            generated.append((chars, sum(member.num_action_tokens for member in group)))
            parts = zip(group, row["advantages"], row["trains"], strict=True)
            trained.append((chars, sum(len(m.token_ids) for m, advantage, trains in parts if trains and advantage)))
    return {
        "worker_tokens": dict(by_worker),
        "question_tokens": generated,
        "trained_tokens": trained,
        "trajectory_lengths": lengths_of(members),
    }
