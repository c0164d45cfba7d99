"""Deployments of plans and of configurations, to compare one with the other."""

from libra.planner.arrangements import Deployed


def planned_deployment(plan):
    engines = {bucket.tp: bucket.engines for bucket in plan.buckets}
    return Deployed(plan.training.gpus, engines, {bucket.tp: bucket.concurrency for bucket in plan.buckets})


def configured_deployment(config):
    """Training workers of a configuration, and engines and concurrency by degree (the mean if they differ)."""
    cluster, slots = config.cluster, {}
    for group in cluster.engines:
        slots.setdefault(group.tp, []).extend([group.slots or config.rollout.slots] * group.count)
    if not slots:
        slots[config.rollout.tp] = [config.rollout.slots] * cluster.rollout_workers
    means = {tp: max(round(sum(each) / len(each)), 1) for tp, each in sorted(slots.items())}
    return Deployed(cluster.train_workers, {tp: len(each) for tp, each in sorted(slots.items())}, means)
