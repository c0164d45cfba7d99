"""What cannot be together with ``trainer.train_prompts``, groups of a batch that stand by for those without signal."""

from __future__ import annotations

from collections.abc import Iterator

from libra.config.models import RunSections


def spare_group_contradictions(config: RunSections) -> Iterator[str]:
    """A message for each contradiction."""
    trainer = config.trainer
    if trainer.train_prompts is None:
        return
    if trainer.train_prompts > trainer.prompts:
        yield (
            f"trainer.train_prompts: {trainer.train_prompts} groups are to train, and trainer.prompts={trainer.prompts} are made; "
            f"type trainer.prompts={2 * trainer.train_prompts}, or trainer.train_prompts={trainer.prompts} or less"
        )
    if trainer.group_size == 1:
        yield (
            "trainer.train_prompts: a group of one has no rewards that differ, so none would train; type trainer.group_size=8, or "
            "leave trainer.train_prompts out"
        )
    if trainer.streaming != "off":
        yield (
            f"trainer.train_prompts: chosen among all groups of a batch, and trainer.streaming={trainer.streaming} trains on some "
            "before the last is complete; type trainer.streaming=off"
        )
    if trainer.late == "correct":
        yield (
            "trainer.train_prompts: chosen once, and with trainer.late=correct a group may have another signal later; type "
            "trainer.late=wait"
        )
    if trainer.algorithm == "opd" and not config.distil.reward_coef:
        yield (
            "trainer.train_prompts: goes by rewards, and trainer.algorithm=opd learns without them; type distil.reward_coef=1, or "
            "leave trainer.train_prompts out"
        )
