"""What the event log is told of a consideration: its numbers, and the commands of one that was accepted."""

from __future__ import annotations

from libra import events
from libra.planner.cost_correction import CostCorrection
from libra.planner.replan import Considered


def plan_log_events(
    seen: Considered,
    predicted_step_s: float | None,
    realised_step_s: float,
    learned: CostCorrection | None = None,
    boundaries_tokens: tuple[float, ...] = (),
    concurrency: tuple[tuple[int, int], ...] = (),
    run: str = "",
    t_s: float = 0.0,
    memory: tuple[float, float] = (0.0, 0.0),
) -> tuple[events.Event, ...]:
    """``plan_considered``, and ``plan_accepted`` where it was; run and time may be filled in by whoever writes them.

    Parameters
    ----------
    seen : Considered
    predicted_step_s, realised_step_s : float
        Of the iteration that has ended; the prediction is the one that was made before it began, None where there was none.
    learned : Correction or None
        What the cost model is off by; None where no cost model predicted.
    boundaries_tokens, concurrency
        Of the buckets of the proposal.
    memory : tuple of float
        Context expected, in tokens, and the share of its KV that the fullest engine would need at it; 0: not known.
    """
    learned = learned or CostCorrection()
    told = events.PlanConsidered(
        run=run,
        t_s=t_s,
        iteration=seen.iteration,
        predicted_step_s=predicted_step_s,
        realised_step_s=realised_step_s,
        current_step_s=seen.current_step_s,
        proposed_step_s=seen.proposed_step_s,
        gain_s=seen.gain_s,
        cost_s=seen.cost_s,
        num_changes=seen.num_changes,
        remaining_iterations=seen.remaining_iterations,
        required_gain_frac=seen.required_gain_frac,
        rollout_factor=learned.rollout.factor,
        training_factor=learned.training.factor,
        train_gpus=seen.train_gpus,
        engines=seen.engines,
        accepted=seen.accepted,
        reason=seen.reason,
        concurrency=seen.concurrency,
        context_tokens=memory[0],
        kv_demand=memory[1],
    )
    if not seen.accepted:
        return (told,)
    accepted = events.PlanAccepted(
        run=run,
        t_s=t_s,
        iteration=seen.iteration,
        train_gpus=seen.train_gpus,
        engines=seen.engines,
        boundaries_tokens=boundaries_tokens,
        concurrency=concurrency,
        commands=tuple((type(command).__name__, str(command)) for command in seen.commands),
    )
    return (told, accepted)
