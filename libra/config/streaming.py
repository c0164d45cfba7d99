"""Whether the steps of a run are streamed: the gradient of a batch is added up in waves while its last groups are generated.

A wave takes groups that are complete, so their advantages must not depend on groups that are not, and all waves of a batch
must see the same weights.
"""

from __future__ import annotations

from libra.config.models import RunSections

MAX_WAVES = 16
"""Most waves of a batch. At most a sixteenth of its gradient is left when its last group arrives; more waves only cost tasks."""
GROUP_ADVANTAGES = ("grpo", "rloo", "opo")
"""Estimators of `libra.config.algorithms.AdvantageName` that look at one group at a time."""


def streaming_obstacle(config: RunSections) -> str | None:
    """Why the steps of this configuration cannot be streamed, with what to type; None if they can."""
    trainer = config.trainer
    passes = trainer.epochs * trainer.minibatches
    if passes > 1:
        return (
            f"one batch takes {passes} optimizer steps, and all but the first need the whole batch; type trainer.epochs=1 "
            "trainer.minibatches=1"
        )
    if trainer.m2po_threshold is not None:
        return (
            f"trainer.m2po_threshold={trainer.m2po_threshold:g} chooses among all tokens of the batch; type "
            "trainer.m2po_threshold=null"
        )
    if trainer.advantage not in GROUP_ADVANTAGES:
        own = "may look at" if ":" in trainer.advantage else "needs"
        return (
            f"trainer.advantage={trainer.advantage} {own} the rewards of the whole batch; type trainer.advantage="
            f"{GROUP_ADVANTAGES[0]} (or {', '.join(GROUP_ADVANTAGES[1:])})"
        )
    return None


def most_waves(config: RunSections) -> int:
    """Waves of a batch at most; 0: its step is not streamed."""
    trainer = config.trainer
    if trainer.streaming == "off" or streaming_obstacle(config) is not None:
        return 0
    return min(MAX_WAVES, trainer.prompts)


def wave_groups(config: RunSections) -> int:
    """Fewest groups of a wave that is not the last: a sequence for each replica."""
    return -(-config.cluster.train_workers // config.trainer.group_size)


def streaming_words(config: RunSections) -> str:
    """Whether the steps are streamed, and why, in one line; empty if that was not asked for."""
    streaming = config.trainer.streaming
    if streaming == "off":
        return ""
    if (obstacle := streaming_obstacle(config)) is not None:
        return f"trainer.streaming={streaming}: steps are not streamed; {obstacle}"
    return (
        f"trainer.streaming={streaming}: steps are streamed; gradients of complete groups are added up in up to "
        f"{most_waves(config)} waves while the other groups of the batch are generated"
    )
