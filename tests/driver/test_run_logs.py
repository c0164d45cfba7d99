"""Records of libraries go to the run's log, and what a user has to know is a line without a traceback."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from libra.driver.run_logs import FOREIGN, RunLogs, ShownFormatter


def failed() -> None:
    raise ConnectionError("a browser left")


def log_with_traceback(name: str, text: str) -> None:
    try:
        failed()
    except ConnectionError:
        logging.getLogger(name).exception(text)


def test_a_traceback_of_a_library_is_in_the_file_and_not_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dask = logging.getLogger("distributed.core")
    handler, propagate = logging.StreamHandler(sys.stderr), dask.propagate
    dask.addHandler(handler)
    try:
        with RunLogs(tmp_path) as logs:
            log_with_traceback("distributed.core", "before the directory")
            assert not logs.path.exists()
            logs.open()
            for name in sorted(FOREIGN):
                logger = logging.getLogger(f"{name}.of_this_test")
                logger.setLevel(logging.ERROR)  # Dask wants less of tornado
                log_with_traceback(logger.name, "a page was closed")
        assert handler in dask.handlers and dask.propagate is propagate
        log_with_traceback("distributed.core", "after the run")
    finally:
        dask.removeHandler(handler)
    text = logs.path.read_text()
    assert text.count("Traceback") == 1 + len(FOREIGN)
    assert text.index("before the directory") < text.index("a page was closed")
    assert capsys.readouterr().err.count("Traceback") == 1, "only what was logged after the run"


def test_what_libra_says_is_a_line_on_the_terminal_and_has_its_traceback_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    libra = logging.getLogger("libra")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ShownFormatter("%(message)s", brief=True))
    libra.addHandler(handler)
    try:
        with RunLogs(tmp_path) as logs:
            logs.open()
            log_with_traceback("libra.driver", "worker train-0 is lost; type this")
    finally:
        libra.removeHandler(handler)
    assert capsys.readouterr().err == "worker train-0 is lost; type this\n"
    assert "ConnectionError: a browser left" in logs.path.read_text()


def test_a_start_that_leaves_no_run_leaves_no_log(tmp_path: Path) -> None:
    with RunLogs(tmp_path / "run"):
        logging.getLogger("distributed").warning("something")
    assert not (tmp_path / "run").exists()
