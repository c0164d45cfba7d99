"""Workloads and traces: what is drawn, what is written down, and what wrong files are told."""

import pytest
from synthetic_workload import synthetic

from benchmarks.virtual.draws import agent_turn_files
from libra.errors import ConfigError, RunDirectoryError
from libra.sim.from_run import workload_of_run
from libra.sim.workload import Workload, draw, load_traces, load_workload
from libra.types import ToolStatus

ROWS = """source,model,task,sample,turn,tool,status,payload_chars,prompt_tokens,cached_tokens,completion_tokens,llm_s,tool_s
s,m,t1,0,1,end,end,0,175,0,30,,
s,m,t1,0,0,bash,success,200,100,0,20,1.0,0.5
s,m,t1,1,0,bash,failure,40,90,0,5,1.0,
s,m,t1,1,1,cat,success,80,,0,6,1.0,0.25
s,m,t2,0,0,none,end,0,50,0,0,1.0,
"""
HEAD = '{"schema":1,"name":"x","trajectories":[[0,0,0,5,"",'


def traces_in(tmp_path):
    path = tmp_path / "agent_turns" / "set.csv"
    path.parent.mkdir()
    path.write_text(ROWS)
    return path


def test_traces_have_the_tokens_and_seconds_of_their_rows(tmp_path):
    first, second, third = load_traces(traces_in(tmp_path))
    assert agent_turn_files(tmp_path) == [tmp_path / "agent_turns" / "set.csv"]
    assert (first.task, first.prompt_tokens, first.family) == ("m/t1", 100, "s")
    assert [tuple(turn) for turn in first.turns] == [(20, "bash", ToolStatus.OK, 55, 0.5), (30, "", "", 0, 0.0)]
    assert second.turns[0].payload_tokens == 10  # the next prompt is not known: characters over four
    assert second.turns[0].tool_s > 0  # not timed: drawn
    assert third.turns[0].new_tokens == 1


def test_a_draw_is_the_same_for_a_seed_and_keeps_samples_of_a_task_together(tmp_path):
    traces = load_traces(traces_in(tmp_path))
    work = draw(traces, num_groups=3, group_size=2, seed=5, iterations=2)
    assert work == draw(traces, num_groups=3, group_size=2, seed=5, iterations=2)
    assert [plan[:3] for plan in work.trajectories] == [(i, g, s) for i in range(2) for g in range(3) for s in range(2)]
    for plan in work.trajectories:  # t1 is the only task with two samples
        assert plan.prompt_tokens in (100, 90)


def test_a_workload_file_reads_back(tmp_path):
    work = synthetic(12, turns=4, seed=1, iterations=2)
    plans = (plan._replace(prompt=f"p{plan.group}" if plan.group else "") for plan in work.trajectories)
    (tmp_path / "named.json").write_text(work._replace(trajectories=tuple(plans)).to_json())
    assert {plan.prompt for plan in load_workload(tmp_path / "named.json").trajectories} == {"", "p1"}
    (tmp_path / "w.json").write_text(work.to_json())
    assert load_workload(tmp_path / "w.json") == work
    assert work.to_json() == synthetic(12, turns=4, seed=1, iterations=2).to_json()


@pytest.mark.parametrize("text", [
    "{", '{"schema": 9}', HEAD + '[[0,"","",0,0]]]]}', HEAD + "[]]]}",
    HEAD + '[[7,"t","success",3,1.5],[1,"","",0,0]]]]}', HEAD + '[[7,"","",3,1.5],[1,"","",0,0]]]]}',
    HEAD + '[[7,"t","",3,1.5]]]]}', HEAD + '[[1,"","",0,0]]],[0,0,0,5,"",[[1,"","",0,0]]]]}',
])  # fmt: skip
def test_what_is_no_workload_is_refused(tmp_path, text):
    (tmp_path / "w.json").write_text(text)
    with pytest.raises(ConfigError, match=r"w\.json|schema|trajector"):
        load_workload(tmp_path / "w.json")


def test_missing_files_and_columns_are_named(tmp_path):
    (tmp_path / "bad.csv").write_text("task,turn\nx,0\n")
    with pytest.raises(ConfigError, match="tool, status, completion_tokens"):
        load_traces(tmp_path / "bad.csv")
    with pytest.raises(ConfigError):
        agent_turn_files(tmp_path)
    with pytest.raises(ConfigError):
        draw([], num_groups=1, group_size=1, seed=0)
    with pytest.raises(RunDirectoryError):
        workload_of_run(tmp_path)


def test_totals_are_the_generated_tokens_by_key():
    one = Workload.from_json('{"schema":1,"name":"x","trajectories":[[0,1,2,5,"",[[7,"t","ok",3,1.5],[4,"","",0,0]]]]}')
    assert one.totals() == {"trajectory-train-0-1-2-e0-x": 11}
    (plan,) = one.trajectories
    assert plan.final_tokens == 19 and one.group_key(plan) == "0-1"
