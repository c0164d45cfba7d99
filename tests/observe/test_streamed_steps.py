"""Waves and turns of engines as page and report show them, from events."""

import re

import pytest

from libra import events
from libra.hardware.prices import load_prices
from libra.observe.page_html import waves_html
from libra.observe.report import write_report
from libra.observe.run_facts import RunFacts
from libra.store.event_log import EventLog

RUN = "demo"


def started(t_s=0.0, epoch=0):
    return events.RunStarted(RUN, t_s, epoch, 0, 9, 4, "fifo", "")


def opened(t_s, wave, *groups, step=0):
    return events.WaveOpened(RUN, t_s, step, wave, tuple((step, group) for group in groups), "")


def changed(t_s, generation, to, worker="a", reason="", undoes=None):
    return events.RoleChangeStarted(RUN, t_s, generation, {worker: {"role": to, "tp": 1}}, reason, undoes)


def an_open_step():
    """Of four groups two are trained, one is in a wave, one is missing; a and b turned, c was refused."""
    return [
        started(), events.WaveParked(RUN, 0.0, 0, 0), events.WaveParked(RUN, 0.0, 1, 0), opened(1.0, 0, 2),
        events.WaveTrained(RUN, 2.0, 0, 0, 1, 3, 0.5), opened(2.0, 1, 0),
        events.EngineTurned(RUN, 2.0, "a", "training", "3 < 4 <b>open</b>"), changed(2.0, 1, "train", reason="the engine turns"),
        events.EngineTurned(RUN, 2.5, "c", "training", "few open"), events.TurnRefused(RUN, 2.5, "c", "it moves"),
        events.RoleChanged(RUN, 3.0, "a", 1, "rollout", "train", 1, 1, {}, 1.0),
        events.WaveTrained(RUN, 4.0, 0, 1, 1, 2, 1.5, 1), opened(4.0, 2, 1),
        events.EngineTurned(RUN, 5.0, "b", "training", "few open"), changed(5.0, 2, "train", "b"),
    ]  # fmt: skip


def facts_of(*given):
    facts = RunFacts(("train-0",))
    for event in given:
        facts.add(event)
    return facts


def cells(html):
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr[^>]*>(.*?)</tr>", html)]


def test_the_page_has_the_waves_of_the_open_step_and_what_is_missing():
    html = waves_html(facts_of(*an_open_step()).snapshot(5.0))
    assert "2 of 4 groups are trained, 1 in training now, 1 in no wave yet." in html
    assert cells(html)[1:] == [["0", "1", "0.50 s", "0"], ["1", "1", "1.50 s", "1"], ["2", "1", "in training", "0"]]
    log = [*an_open_step(), events.WaveTrained(RUN, 6.0, 0, 2, 1, 1, 1.0), opened(6.0, 3, 3)]
    log += [events.WaveTrained(RUN, 7.0, 0, 3, 1, 0, 1.0), events.StepFinished(RUN, 8.0, 0, 0.5, 4.0)]
    facts = facts_of(*log)
    assert "Waves of step 1" in waves_html(facts.snapshot(8.0))  # its waves are requested already
    facts.streamed.waves.pop(1)
    assert "4 of 4 groups are trained; the step was taken." in waves_html(facts.snapshot(8.0))


def test_a_start_trains_the_waves_of_the_open_step_again_and_they_count_once():
    log = [*an_open_step(), started(0.0, 1), events.WaveParked(RUN, 0.0, 0, 0), opened(0.5, 0, 2)]
    step = facts_of(*log).streamed.open_step()
    assert (step["trained"], step["in_wave"], step["missing"]) == (0, 1, 3)
    assert [turn.result for turn in facts_of(*log).streamed.turns][-1] == "the run was stopped before its end"


def test_each_turn_is_one_decision_with_its_reason():
    lines = [line[1:] for line in facts_of(*an_open_step()).snapshot(5.0)["decisions"]]
    assert ["a turns to training", "3 < 4 <b>open</b>"] in lines
    assert ["c stays as it is until the next version", "it moves"] in lines
    assert not any("change 1 of" in what for what, _ in lines)
    other = facts_of(*an_open_step(), changed(6.0, 3, "train", "d", "asked for")).snapshot(6.0)["decisions"]
    assert other[0][1:] == ["change 3 of d", "asked for"]


@pytest.mark.parametrize(
    ("event", "result"),
    [
        (events.RoleChangeFailed(RUN, 6.0, 2, "b left the cluster"), "undone: b left the cluster"),
        (events.RoleChangeCancelled(RUN, 6.0, 2), "cancelled on request"),
        (events.RoleChanged(RUN, 6.0, "b", 2, "rollout", "train", 1, 1, {}, 1.0), "done"),
        (events.RoleChanged(RUN, 6.0, "b", 7, "rollout", "train", 1, 1, {}, 1.0), "under way"),
    ],
)
def test_a_turn_has_the_result_of_its_own_change(event, result):
    assert facts_of(*an_open_step(), event).streamed.turns[-1].result == result


def test_the_report_has_a_table_of_waves_and_one_of_turns(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.resolved.yaml").write_text("run: {name: run, iterations: 9}\n")
    with EventLog(run / "events.jsonl") as log:
        for event in an_open_step():
            log.write(event)
    write_report([run], tmp_path / "report.html", load_prices())
    page = (tmp_path / "report.html").read_text()
    section = page[page.index('<section id="waves">') : page.index('<section id="mismatch">')]
    waves, turns = re.findall(r"<table>(.*?)</table>", section)
    assert cells(waves)[1:] == [["0", "2", "1 + 1 + 1", "2.00 s", "wave 1: 1", "open"]]
    assert cells(turns)[1:] == [
        ["2.0 s", "a", "training", "done", "1.00 s", "3 &lt; 4 &lt;b&gt;open&lt;/b&gt;"],
        ["2.5 s", "c", "training", "refused: it moves", "–", "few open"],
        ["5.0 s", "b", "training", "under way", "–", "few open"],
    ]
