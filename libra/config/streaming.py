"""Whether steps are streamed: a batch's gradient is summed in waves while its last groups generate.

A wave takes complete groups, so their advantages must not depend on other groups, and all waves of
a batch must see the same weights.
"""

from __future__ import annotations

from libra.config.algorithms import GROUP_ADVANTAGES
from libra.config.sections import RunSections

MAX_WAVES = 16
"""Most waves of a batch. At most a sixteenth of its gradient is left when its last group arrives;
more waves only cost tasks."""
SEQUENCES = 4
"""Sequences of a wave for each trainer, where engines turn: few of them divide badly, many make one
that comes wait."""


def streaming_obstacle(config: RunSections) -> str | None:
    """Why steps cannot be streamed, with the text to type; None if they can."""
    trainer = config.trainer
    passes = trainer.epochs * trainer.minibatches
    if passes > 1:
        return (
            f"one batch takes {passes} optimizer steps, and all but the first need the whole batch; type trainer.epochs=1 "
            "trainer.minibatches=1"
        )
    if trainer.reject_args["m2po"] is not None:
        return (
            f"trainer.reject_args.m2po={trainer.reject_args['m2po']:g} chooses among all tokens of the batch; type "
            "trainer.reject_args.m2po=null"
        )
    if trainer.late != "off":
        return f"trainer.late={trainer.late} looks for rewards when a batch is complete; type trainer.late=off"
    if trainer.advantage not in GROUP_ADVANTAGES:
        own = "may look at" if ":" in trainer.advantage else "needs"
        return (
            f"trainer.advantage={trainer.advantage} {own} the rewards of the whole batch; type trainer.advantage="
            f"{GROUP_ADVANTAGES[0]} (or {', '.join(GROUP_ADVANTAGES[1:])})"
        )
    return None


def most_waves(config: RunSections) -> int:
    """Most waves of a batch; 0 if its step is not streamed."""
    trainer = config.trainer
    if trainer.streaming == "off" or streaming_obstacle(config) is not None:
        return 0
    return min(MAX_WAVES, trainer.prompts)


def wave_groups(config: RunSections) -> int:
    """Fewest groups of a wave before the last: enough for a sequence per replica."""
    return -(-config.cluster.train_workers // config.trainer.group_size)


def turning_obstacle(config: RunSections) -> str | None:
    """Why no engine can train during the tail of a rollout, with the text to type; None if any
    can."""
    cluster = config.cluster
    if not most_waves(config):
        return "its steps are not streamed, so that no gradient is computed before the batch is complete; type trainer.streaming=on"
    if not cluster.hybrid_workers:
        return "no worker can change its role; type cluster.hybrid_workers=1 or more"
    engines = sum(group.count for group in cluster.engines) if cluster.engines else cluster.rollout_workers
    if cluster.scheduler is None and engines < 2 and config.planner.layout != "auto":
        return "the only engine has to generate; type cluster.rollout_workers=2 or more"
    if (tp := max((group.tp for group in cluster.engines), default=config.rollout.tp)) > 1:
        return f"an engine of {tp} GPUs would train with one of them; type rollout.tp=1, or cluster.engines with tp 1"
    if config.planner.replan == "apply":
        return "the planner would move the same workers; type planner.replan=advise"
    return None


def turns(config: RunSections) -> bool:
    """Whether engines train during the tail of a rollout."""
    return config.trainer.turning != "off" and turning_obstacle(config) is None


def ways_of(config: RunSections) -> tuple[str, ...]:
    """Names in `libra.policy.step_ways` that ``auto`` may choose, the smallest change first."""
    if not most_waves(config):
        return ("split",)
    trainer, may_turn = config.trainer, turns(config)
    if may_turn and trainer.turning == "on":
        return ("turning",)
    stays = ("split", "streaming") if trainer.streaming == "auto" else ("streaming",)
    return (*stays, "turning") if may_turn else stays


def enough_groups(config: RunSections) -> int:
    """Most groups of a wave if engines may train, else 0: `SEQUENCES` per possible trainer."""
    if not turns(config):
        return 0
    cluster = config.cluster
    return -(-SEQUENCES * (cluster.train_workers + cluster.hybrid_workers) // config.trainer.group_size)


def streaming_words(config: RunSections) -> str:
    """Whether steps are streamed, and why, in one line; empty if streaming is off."""
    streaming = config.trainer.streaming
    if streaming == "off":
        return ""
    if (obstacle := streaming_obstacle(config)) is not None:
        return f"trainer.streaming={streaming}: steps are not streamed; {obstacle}"
    chooses = ", where the measured steps of the run say that it pays" if ways_of(config)[0] == "split" else ""
    found = (
        f"trainer.streaming={streaming}: steps are streamed{chooses}; gradients of complete groups are added up in up to "
        f"{most_waves(config)} waves while the other groups of the batch are generated"
    )
    return found + (", by engines too that its tail does not need" if turns(config) else "")
