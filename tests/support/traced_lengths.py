"""C-MLFQ with the lengths of the trajectories that `libra.testing.TraceTurns` replays, as a policy of a run's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from libra import keys
from libra.policy import CMLFQ
from libra.policy.forecast import Forecast
from libra.policy.oracle_lengths import KnownLengths
from libra.testing import TraceTurns
from libra.types import TrajectoryId

TRACES = Path(__file__).parents[2] / "benchmarks" / "data" / "agent_turns" / "tau_airline_gpt4o.csv"
GROUPS, GROUP_SIZE, MAX_NEW_TOKENS = 3, 4, 64
ARGS: dict[str, Any] = {
    "path": str(TRACES), "groups": GROUPS, "group_size": GROUP_SIZE, "tokens_frac": 0.05, "payload_frac": 0.3,
    "tool_frac": 0.0,
}  # fmt: skip
"""Of the environment."""


def total_tokens(environment: TraceTurns, group: int, sample: int) -> int:
    """Tokens that a trajectory generates, if its context does not end it."""
    prompt, tid, total, turn = environment.prompt("train", group), TrajectoryId(0, group, sample), 0, 0
    while True:
        scripted = environment.scripted(tid, prompt, turn)
        total, turn = total + min(scripted.new_tokens, MAX_NEW_TOKENS), turn + 1
        if not scripted.calls:
            return total


class ByPlace(KnownLengths):
    """The same lengths in every iteration, by group and sample."""

    def __init__(self) -> None:
        super().__init__()
        environment = TraceTurns(**ARGS)
        self._by_place = {
            (group, sample): float(total_tokens(environment, group, sample))
            for group in range(GROUPS)
            for sample in range(GROUP_SIZE)
        }

    def remaining(self, key: str) -> Forecast:
        """As of `KnownLengths`."""
        parsed = keys.parse(key)
        assert parsed is not None
        _, group, sample = parsed.indices
        self._totals[key] = self._by_place[group, sample]
        return super().remaining(key)


class TracedLengths(CMLFQ):
    """`libra.policy.Oracle`, live."""

    def __init__(self) -> None:
        super().__init__(ByPlace())
