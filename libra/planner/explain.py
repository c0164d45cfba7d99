"""A plan in words and numbers, for somebody who has read nothing else."""

from __future__ import annotations

from libra.planner.plan import Alternative, Bucket, Plan

_WHY = {
    "training": "training takes longer than generating; GPUs are worth more there",
    "rollout throughput": "engines are busy nearly all the time; more of them would shorten the step",
    "longest trajectory": "the longest trajectories take this long however many GPUs there are; faster engines would help, more would not",
}


def text(plan: Plan) -> str:
    """The whole plan, a screenful."""
    steps = "overlap (training waits for whichever is later)" if plan.eta else "follow each other (run.eta=0)"
    lines = [
        f"Plan: {plan.model} on {plan.num_gpus} x {plan.gpu}, {plan.num_trajectories} trajectories a step, rollout and training {steps}",
        "",
        f"  training    {plan.training.gpus:>5} GPUs   {plan.training.layout}, a step {_s(plan.train_s)}, "
        f"{plan.training.memory_bytes / 1e9:.0f} GB on the fullest GPU, {plan.training.headroom_bytes / 1e9:.0f} GB free",
        f"  rollout     {plan.rollout_gpus:>5} GPUs   {sum(b.engines for b in plan.buckets)} engines, done after {_s(plan.rollout_s)}",
        *map(_bucket_line, plan.buckets),
    ]
    if plan.spare_gpus:
        lines.append(f"  neither     {plan.spare_gpus:>5} GPUs   neither pool would be faster with them")
    lines += [
        "",
        f"  one step    {_s(plan.step_s)}, {plan.gpu_hours_per_step:.1f} GPU-hours "
        f"(between {_s(plan.low_s)} and {_s(plan.high_s)} as trajectories happen to be ordered), {_s(plan.update_s)} of it new weights",
        f"  bottleneck  {plan.bottleneck}: {_WHY[plan.bottleneck]}",
        "  GPU time    "
        + ", ".join(f"{100 * share:.0f} % {cause}" for cause, share in plan.idle_frac.items() if share >= 0.005),
    ]
    if plan.needed_gpus < plan.num_gpus - plan.spare_gpus:
        lines.append(
            f"  fewer GPUs  {plan.needed_gpus} would do for the same step if engines never drained; the rest shortens the draining"
        )
    lines += ["", "No plan is faster than", *_bound_lines(plan)]
    if plan.alternatives:
        lines += ["", "Next best, and why not", *map(alternative_line, plan.alternatives)]
    if plan.left_out:
        lines += ["", "Left out", *(f"  {name}: {reason}" for name, reason in plan.left_out.items())]
    return "\n".join(lines)


def _bucket_line(bucket: Bucket) -> str:
    tokens = (
        f"from {bucket.from_tokens:,.0f} tokens"
        if bucket.to_tokens is None
        else (f"{bucket.from_tokens:,.0f} to {bucket.to_tokens:,.0f} tokens")
    )
    return (
        f"    {bucket.engines:>4} x TP{bucket.tp:<2}                 trajectories that generate {tokens} ({bucket.num_trajectories}), "
        f"{bucket.concurrency} at once per engine; busy {100 * bucket.load_frac:.0f} %, KV memory {100 * bucket.kv_used_frac:.0f} % full"
    )


def _bound_lines(plan: Plan) -> list[str]:
    bounds = plan.bounds
    return [
        f"  {_s(bounds.longest_s):>10}  the longest trajectory alone on its best engine, tools included",
        f"  {_s(bounds.throughput_s):>10}  all generating, evenly over these rollout GPUs",
        f"  {_s(bounds.training_s):>10}  training on its pool",
        f"  {_s(bounds.step_s):>10}  any split and any engines, proven with whole trajectories before engines drain "
        f"(best found: {100 * bounds.gap_frac:.3f} % above)",
    ]


def alternative_line(other: Alternative) -> str:
    """One alternative: what it is, what it takes, and why it lost."""
    engines = " + ".join(f"{number} x TP{tp}" for tp, number in other.engines.items())
    return f"  {_s(other.step_s):>10}  ({100 * other.slower_frac:+.1f} %)  {other.name}: {other.train_gpus} training GPUs, {engines}; {other.reason}"


def _s(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.3g} s"
