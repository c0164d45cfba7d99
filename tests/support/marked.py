"""Questions for agents of tests; apart from these, which import no more than they need."""

import json
from pathlib import Path

from libra.testing import FixedTurns
from libra.types import Episode, Prompt


class Marked(FixedTurns):
    """Questions with the path of a file, by which an agent knows that it was here before."""

    def __init__(self, *, mark: str = "", seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.mark = mark

    def prompt(self, split: str, index: int) -> Prompt:
        given = super().prompt(split, index)
        return Prompt(given.prompt_id, given.messages, {"mark": self.mark})

    def grade(self, episode: Episode) -> float:
        if episode.own_reward is not None:
            return episode.own_reward
        Path(self.mark).joinpath(f"{episode.trajectory_id}.json").write_text(json.dumps(episode.result))
        return super().grade(episode)
