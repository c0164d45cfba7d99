"""Files of recorded agents: words of their formats become Libra's outcomes here, and an unknown one is refused."""

import pytest

from benchmarks.report import DATA
from benchmarks.virtual.draws import agent_turn_files
from libra.errors import ConfigError
from libra.planner.agent_turns import agent_turns, read_agent_turns
from libra.types import NO_TOOL, ToolStatus

HEAD = "task,sample,turn,tool,status,completion_tokens"


def statuses(*rows, head=HEAD, required=("status",)):
    (one,) = agent_turns([head, *rows], required, "traces x.csv")
    return [(turn.tool, turn.status) for turn in one.turns]


@pytest.mark.parametrize(("word", "outcome"), [
    ("success", ToolStatus.OK), ("failure", ToolStatus.ERROR), ("timeout", ToolStatus.TIMEOUT),
    ("format_error", ToolStatus.MALFORMED), *((str(status), status) for status in ToolStatus),
])  # fmt: skip
def test_words_of_recorded_agents_and_of_libra_are_outcomes(word, outcome):
    found = statuses(f"t,0,0,ls,{word},5", f"t,0,1,ls,{word},5")
    assert found == [("ls", outcome)] * 2
    assert all(type(status) is ToolStatus for _, status in found)


@pytest.mark.parametrize("row", ["none,end", "echo,end", "ls,", ","])
def test_a_trajectory_ends_where_no_tool_came_back(row):
    assert statuses("t,0,0,ls,success,5", f"t,0,1,{row},5") == [("ls", ToolStatus.OK), ("", NO_TOOL)]


def test_a_word_that_the_format_does_not_have_is_named_with_its_place():
    with pytest.raises(ConfigError) as error:
        statuses("t,0,0,ls,success,5", "t,0,1,ls,failed,5")
    assert all(each in str(error.value) for each in ("x.csv, line 3", "'t'", "'failed'", "success"))


@pytest.mark.parametrize("word", ["", "end"])
def test_a_turn_that_is_followed_by_another_says_how_its_tool_came_back(word):
    rows = ("t,0,0,ls,success,5", f"t,0,3,ls,{word},5", "t,0,7,ls,success,5")
    with pytest.raises(ConfigError, match="turn 3"):
        statuses(*rows)


@pytest.mark.parametrize("path", agent_turn_files(DATA), ids=lambda path: path.stem)
def test_failures_of_the_excerpts_are_kept(path):
    words = [row.split(",") for row in path.read_text().splitlines()]
    column = words[0].index("status")
    failed = sum(row[column] == "failure" for row in words[1:])
    turns = [turn for one in read_agent_turns(path, ("status",)) for turn in one.turns]
    assert sum(turn.status is ToolStatus.ERROR for turn in turns) == failed > 0
