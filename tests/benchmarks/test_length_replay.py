"""Replays tell a forecaster only what has happened, and score only what was left to generate."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.agent_traces import Trace, Turn, read_traces, sets_in
from benchmarks.forecasters import GlobalMean
from benchmarks.length_replay import ScoredForecast, replay, scores, tail_recall
from benchmarks.length_skill import folds_of
from benchmarks.report import DATA
from libra.errors import ConfigError
from libra.policy.forecast import Forecast
from libra.policy.messages import Event, QuantumFinished, TrajectoryEnded, TrajectoryParked
from libra.policy.oracle_lengths import KnownLengths
from libra.types import NO_TOOL, ToolStatus


class Listener(GlobalMean):
    """Counts what is live and writes down what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Event] = []
        self.most = 0

    def handle(self, event: Event) -> None:
        super().handle(event)
        self.heard.append(event)
        self.most = max(self.most, len(self._tracks))


def trace(name: str, *tokens: int, group: str = "", last: str = "") -> Trace:
    tools = ["ls"] * (len(tokens) - 1) + [last]
    turns = tuple(
        Turn(made, tool, ToolStatus.OK if tool else NO_TOOL, 10, float(made))
        for made, tool in zip(tokens, tools, strict=True)
    )
    return Trace(name, group or name, group or name, "family", turns)


def test_every_turn_is_told_once_and_in_order() -> None:
    groups = [[trace(f"{g}-{s}", 10 + s, 20, 30, group=str(g)) for s in range(3)] for g in range(4)]
    listener = Listener()
    replay(listener, groups, 6)
    for group in groups:
        for one in group:
            mine = [event for event in listener.heard if getattr(event, "key", "") == one.key]
            assert isinstance(mine[0], TrajectoryParked) and isinstance(mine[-1], TrajectoryEnded)
            assert sum(event.tokens for event in mine if isinstance(event, QuantumFinished)) == one.tokens
    assert listener.most == 6


def test_members_of_a_group_start_together() -> None:
    listener = Listener()
    replay(listener, [[trace(f"g-{s}", 10, 20, group="g") for s in range(4)]], 1)
    assert [type(event) for event in listener.heard[:4]] == [TrajectoryParked] * 4


def test_a_terminal_return_is_not_scored() -> None:
    scored = replay(GlobalMean(), [[trace("t", 10, 20, 30, last="submit")]], 1)
    assert [item.truth for item in scored] == [50, 30]


def test_the_oracle_scores_one() -> None:
    traces = [trace(f"t-{n}", *(10 + n * k for k in range(1, 6))) for n in range(20)]
    scored = replay(KnownLengths({one.key: one.tokens for one in traces}), [[one] for one in traces], 5)
    assert scores(scored) == {"r2": 1.0, "logr2": 1.0, "spearman": pytest.approx(1.0)}
    assert tail_recall(scored, traces, 0.5) == 1.0


def test_progress_at_the_same_count_of_tokens_gives_nothing_away() -> None:
    """The global mean says the same of all; at a share of its own length it would rank the long ones first."""
    traces = [trace(f"t-{n:02}", *([10] * (n + 1))) for n in range(40)]

    class Same(GlobalMean):
        def remaining(self, key: str) -> Forecast:
            return Forecast(100.0, 100.0, 0.0)

    scored = replay(Same(), [[one] for one in traces], 40)
    assert tail_recall(scored, traces, 0.5) == 0.0  # ties go by name here, and the long ones come last


def test_scores_of_known_forecasts() -> None:
    scored = [
        ScoredForecast("a", 0, 10, 10, 10),
        ScoredForecast("b", 0, 30, 20, 20),
        ScoredForecast("c", 0, 20, 30, 30),
    ]
    assert scores(scored)["r2"] == pytest.approx(1 - 200 / 200)
    assert scores(scored)["spearman"] == pytest.approx(1.0)


def test_a_task_is_in_one_fold() -> None:
    traces = [trace(f"t-{n}-{s}", 10, 20, group=f"t-{n}") for n in range(10) for s in range(3)]
    folds = folds_of(traces)
    tasks = [{one.task for group in fold for one in group} for fold in folds]
    assert sum(len(found) for found in tasks) == 10 == len(set.union(*tasks))
    assert all(found for found in tasks)


def test_the_excerpt_is_read() -> None:
    found = {name: read_traces(path) for name, path in sets_in(DATA).items()}
    assert {name: len(traces) for name, traces in found.items()} == {"mini_swe": 252, "tau": 96}
    assert len({one.group for one in found["tau"]}) == 24


def test_unseen_sets_are_named_by_their_file(tmp_path: Path) -> None:
    (tmp_path / "agent_turns").mkdir()
    columns = "source,model,task,sample,turn,tool,status,payload_chars,prompt_tokens,cached_tokens,completion_tokens"
    rows = "\n".join([columns, "s,m,t,0,0,ls,success,40,1,0,7", "s,m,t,0,1,none,end,0,1,0,5"])
    (tmp_path / "agent_turns" / "other.csv").write_text(rows)
    (one,) = read_traces(sets_in(tmp_path)["other"])
    assert one.tokens == 12
    assert [turn.tool for turn in one.turns] == ["ls", ""]


def test_a_directory_without_traces_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="agent_turns"):
        sets_in(tmp_path)
