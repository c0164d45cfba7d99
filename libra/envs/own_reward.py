"""The reward that an agent gives itself."""

from __future__ import annotations

from libra.types import EndReason, Episode


def own_reward(episode: Episode) -> float:
    """What the agent returned as its reward, or posted to its gateway; 0 if it failed without one for the length of an answer or of
    the conversation, or its turns. ValueError if it ended by itself without one."""
    if episode.own_reward is None and episode.end_reason in (EndReason.LENGTH, EndReason.MAX_TURNS):
        return 0.0
    if episode.own_reward is None:
        raise ValueError(
            f"{episode.trajectory_id}: the agent gave no reward; let it return a number or {{'reward': NUMBER}}, or post one to "
            "/reward, or give libra.train a reward function"
        )
    return episode.own_reward
