"""The stages of a start, with a clock of our own."""

from __future__ import annotations

import io

from libra.observe.start_stages import StartStages


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(stream: io.StringIO, *, enabled: bool = True, fails: bool = False) -> str:
    now = [0.0]
    with StartStages(enabled=enabled, stream=stream, clock_s=lambda: now[0]) as stages:
        stages.say("demo: 3 iterations")
        for stage, seconds in (("model", 0.25), ("workers", 2.0)):
            stages.begin(stage)
            now[0] += seconds
        if fails:
            stages.end(failed=True)
    return stream.getvalue()


def test_a_pipe_has_a_line_for_each_stage_when_it_has_ended() -> None:
    assert written(io.StringIO()) == "demo: 3 iterations\nstart: model 0.2 s\nstart: workers 2.0 s\n"


def test_a_terminal_has_one_line_that_grows() -> None:
    assert written(Terminal()) == "demo: 3 iterations\nstart: model 0.2 s, workers 2.0 s\n"


def test_a_stage_that_failed_has_no_seconds_and_ends_its_line() -> None:
    assert written(Terminal(), fails=True) == "demo: 3 iterations\nstart: model 0.2 s, workers\n"
    assert written(io.StringIO(), fails=True) == "demo: 3 iterations\nstart: model 0.2 s\n"


def test_nothing_is_written_without_progress() -> None:
    assert written(io.StringIO(), enabled=False) == ""
