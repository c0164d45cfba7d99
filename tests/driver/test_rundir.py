"""What is left of a run's directory, its log there, and its summary: nothing of a start that failed, all once it has begun."""

import logging
import sys
from pathlib import Path

import pytest

from libra.driver.run_console import FOREIGN, RunLogs, RunSummary, ShownFormatter
from libra.driver.run_session import Session
from libra.observe.metrics import MetricsLog
from libra.testing import FixedTurns


def test_an_error_at_the_end_of_a_run_leaves_all_that_it_committed(make_config, client, monkeypatch):
    session = Session(make_config(run={"iterations": 1}), environment=FixedTurns(), client=client)
    close = MetricsLog.close

    def full(log):
        close(log)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MetricsLog, "close", full)
    with pytest.raises(OSError, match="No space"), session:
        assert len(list(session.iterations())) == 1
    assert (session.directory / "batches" / "batch-000000.json").is_file()


def test_a_start_that_fails_leaves_nothing(make_config, client, monkeypatch, tmp_path):
    def refused(*given):
        raise OSError("refused")

    monkeypatch.setattr("libra.driver.run_session.register_run", refused)
    there = set(tmp_path.iterdir())
    config = make_config(run={"dir": str(tmp_path / "new" / "runs")})
    with pytest.raises(OSError, match="refused"):
        Session(config, environment=FixedTurns(), client=client).__enter__()
    assert set(tmp_path.iterdir()) == there


def log_with_traceback(name, text):
    try:
        raise ConnectionError("a browser left")
    except ConnectionError:
        logging.getLogger(name).exception(text)


def test_a_traceback_of_a_library_is_in_the_file_and_not_on_the_terminal(tmp_path, capsys):
    dask = logging.getLogger("distributed.core")
    handler, propagate = logging.StreamHandler(sys.stderr), dask.propagate
    dask.addHandler(handler)
    try:
        with RunLogs(tmp_path) as logs:
            for name in sorted(FOREIGN):
                logger = logging.getLogger(f"{name}.of_this_test")
                logger.setLevel(logging.ERROR)  # Dask wants less of tornado
                log_with_traceback(logger.name, "a page was closed")
        assert handler in dask.handlers and dask.propagate is propagate
        log_with_traceback("distributed.core", "after the run")
    finally:
        dask.removeHandler(handler)
    text = logs.path.read_text()
    assert text.count("Traceback") == len(FOREIGN)
    assert capsys.readouterr().err.count("Traceback") == 1, "only what was logged after the run"


def test_what_libra_says_is_a_line_on_the_terminal_and_has_its_traceback_in_the_file(tmp_path, capsys):
    libra, handler = logging.getLogger("libra"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(ShownFormatter("%(message)s", brief=True))
    libra.addHandler(handler)
    try:
        with RunLogs(tmp_path) as logs:
            log_with_traceback("libra.driver", "worker train-0 is lost; type this")
    finally:
        libra.removeHandler(handler)
    assert capsys.readouterr().err == "worker train-0 is lost; type this\n"
    assert "ConnectionError: a browser left" in logs.path.read_text()


def summary(**changes):
    values = {
        "iterations": [{"reward": 0.125, "generated_tokens": 1000, "left_out": 0}, {"reward": 0.5,
        "generated_tokens": 2500, "left_out": 2}], "evaluations": [{"reward": 0.25, "num": 64}, {"reward": 0.75,
        "num": 64}], "checkpoint": Path("runs/demo/checkpoints/2"), "wall_s": 12.4,
    }  # fmt: skip
    return RunSummary("demo", Path("runs/demo"), **{**values, **changes})


def test_a_summary_is_a_short_table_of_what_there_is_also_in_a_notebook():
    text, page = str(summary()), summary(checkpoint=Path("<b>x</b>"))._repr_html_()
    assert len(text.splitlines()) == len(summary().rows()) == page.count("<tr>") == 8
    for words in ("0.250 before, 0.750 after, 64", "0.125 in the first iteration, 0.500", "3,500", "checkpoints/2"):
        assert words in text
    assert "<b>" not in page and "0.250 before, 0.750 after" in page
    assert len(summary(iterations=[], evaluations=[], checkpoint=None).rows()) == 3
