"""What bounds a run's step, work or its longest trajectory, and closed forms of other ways to take it.

With W the GPU-seconds of a step, G the GPUs and L the longest trajectory alone: x = ((L + update) / (eta + 1)) / (W / G). Where x
is small, GPUs are the limit, and what keeps them busy helps; where it is large, they wait for one trajectory whatever is done with
them.

The forms are rough (15 % where they were compared with a simulation): engines are taken to drain as long as in the plan, and half
of a batch's gradient to be computed before its last group arrives. `libra simulate --against all` simulates the same systems.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from libra.planner.plan import Plan

LATENCY_BOUND, WORK_BOUND = 3.0, 0.8
"""Values of x above and below which one of the two is the limit."""
LEFT_FRAC = 0.5
"""Share of a batch's gradient that a streaming step has left when its last group arrives: 0.29 and 0.58 in simulations of two sets
of traces, for groups end late."""
WORTH_FRAC = 0.05
"""Gain of a way over the plan's step from which on it is proposed: the forms are no better than that."""
CHANGES_S = 10.8 + 8.0
"""Seconds in which an engine's GPUs turn to training, and back (Libra, arXiv:2606.03077 v2, Qwen3-14B on A800)."""
CHANGES_FRAC = 0.1
"""Roles that change within a step are only considered where both changes take less than this part of it."""
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "split": {},
    "streaming": {"trainer.streaming": "on"},
    "turning": {"trainer.streaming": "on", "trainer.turning": "auto"},
}
"""Ways that can be configured, and how; colocated pools are simulated only."""


@dataclass(frozen=True, slots=True)
class Regime:
    """What bounds a step.

    Attributes
    ----------
    path_over_work : float
        x, as above.
    step_s : mapping of str to float
        Predicted seconds of a step: ``split`` (the plan), ``streaming``, and at staleness bound 0, if changes of roles are short
        against a step, ``colocated`` and ``turning``.
    choice : str
        The way to take: the fastest of them that can be configured, ``split`` (change nothing) unless another saves
        `WORTH_FRAC`. Roles do not change within a step that is bound by its longest trajectory.
    settings : mapping of str to str
        What to type for it; empty: nothing.
    words : str
        What follows for the user.
    """

    path_over_work: float
    step_s: Mapping[str, float]
    choice: str
    settings: Mapping[str, str]
    words: str


def regime(plan: Plan, *, changes_s: float = CHANGES_S, streams: bool = True) -> Regime:
    """The regime of a plan.

    Parameters
    ----------
    changes_s : float
        Seconds in which an engine's GPUs turn to training, and back.
    streams : bool
        Whether the algorithm allows a streaming step.
    """
    gpus, train, update, eta = plan.num_gpus, plan.training.gpus, plan.update_s, plan.eta
    rolling = max(gpus - train, 1)
    work_s = (plan.bounds.throughput_s * rolling + plan.train_s * train) / gpus
    x = (plan.bounds.longest_s + update) / (eta + 1) / max(work_s, 1e-12)
    step_s = {"split": plan.step_s}
    last_s = LEFT_FRAC * plan.train_s
    if streams and eta:
        latency_s = (plan.rollout_s + last_s + update) / (eta + 1)
        step_s["streaming"] = max(plan.train_s + update, plan.bounds.throughput_s, latency_s)
    elif streams:
        step_s["streaming"] = max(plan.rollout_s + last_s, plan.train_s) + update
    if not eta and changes_s < CHANGES_FRAC * plan.step_s:
        drains_s = max(0.0, plan.rollout_s - plan.bounds.throughput_s)
        together_s = max(plan.bounds.longest_s, plan.bounds.throughput_s * rolling / gpus + drains_s)
        trains_s = plan.train_s * train / gpus
        step_s["colocated"] = together_s + trains_s + update + changes_s
        if streams:
            step_s["turning"] = max(together_s + LEFT_FRAC * trains_s, work_s) + update + changes_s
    choice = chosen(x, step_s)
    return Regime(x, step_s, choice, SETTINGS[choice], _words(x, step_s, eta))


def chosen(x: float, step_s: Mapping[str, float]) -> str:
    """The way to take a step, as in `Regime.choice`."""
    ways = [way for way in step_s if way in SETTINGS and (way != "turning" or x <= LATENCY_BOUND)]
    best = min(ways, key=lambda way: step_s[way])
    return best if step_s[best] <= (1.0 - WORTH_FRAC) * step_s["split"] else "split"


def _words(x: float, step_s: Mapping[str, float], eta: int) -> str:
    share = f"the longest trajectory takes {x:.2g} times as long as the work of all GPUs"
    if x > LATENCY_BOUND:
        found = (
            f"latency-bound: {share}; fewer GPUs, faster tools or a larger run.eta (now {eta}) help, other roles do not"
        )
        if chosen(x, step_s) == "streaming":
            saved = 1 - step_s["streaming"] / step_s["split"]
            found += f"; trainer.streaming=on would save about {100 * saved:.0f} %"
        return found
    best = min(step_s, key=lambda name: step_s[name])
    saved = 1 - step_s[best] / step_s["split"]
    kind = "work-bound" if x < WORK_BOUND else "bound by work and by latency"
    if saved < WORTH_FRAC:
        return f"{kind}: {share}; change nothing: no other way to take a step would save {100 * WORTH_FRAC:.0f} %"
    how = {
        "streaming": "gradients of complete groups while others are generated (trainer.streaming=on)",
        "colocated": "all GPUs generating and then training (simulated only, see libra simulate --against all)",
        "turning": "engines that train while the tail runs (trainer.streaming=on trainer.turning=on, with cluster.hybrid_workers)",
    }[best]
    found = f"{kind}: {share}; {how} would save about {100 * saved:.0f} % of a step"
    if best in ("colocated", "turning") and "streaming" in step_s:
        alone = 1 - step_s["streaming"] / step_s["split"]
        if alone >= WORTH_FRAC:
            found += f", trainer.streaming=on alone {100 * alone:.0f} %"
    return found
