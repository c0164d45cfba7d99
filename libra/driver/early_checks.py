"""Checks before torch and Dask are imported: names, paths, missing engines, and the main program.

`libra.driver.run_start.prepare` repeats these checks among others. Worker processes import the
program that starts the run, so the program must be a file that does not start the run on import.
"""

from __future__ import annotations

import ast
import re
import socket
import sys
from pathlib import Path
from types import FrameType

from libra.config import RunConfig, resolve_model
from libra.config.model_paths import model_line
from libra.config.sections import check_vllm
from libra.driver.rundir import check_free, run_directory
from libra.errors import ClusterError, ConfigError


def first_line(config: RunConfig) -> str:
    count, model = config.run.iterations, model_line(config.model.path)
    return f"{config.run.name}: {count} iteration{'s' * (count != 1)} of {model}, in {run_directory(config)}"


def check_early(config: RunConfig, *, resume: bool, starts_workers: bool, given: bool) -> None:
    """Raise LibraError if a name or file is wrong; ``given``: the environment is an object."""
    if not resume:
        check_free(run_directory(config))
    if config.cluster.scheduler is not None:
        _check_listening(config.cluster.scheduler)
    resolve_model(config.model.path)
    if starts_workers and config.rollout.engine == "vllm":
        check_vllm()
    if not given:
        from libra.envs.environment import check_named

        check_named(config.environment.name, config.environment.args)


def no_scheduler(address: str, error: Exception) -> ClusterError:
    """The error of a run whose scheduler does not answer."""
    return ClusterError(
        f"cluster.scheduler: no Dask scheduler answers at {address!r} ({error}); libra cluster tls DIR makes the keys of one, or "
        "leave --scheduler out for a local cluster"
    )


def _check_listening(address: str) -> None:
    """ClusterError if nothing listens at a ``tcp://`` or ``tls://`` address; other forms are left to Dask."""
    found = re.fullmatch(r"(?:tcp|tls)://\[?([^/]+?)\]?:(\d+)", address if "://" in address else f"tcp://{address}")
    if found is not None and int(found[2]) < 2**16:
        try:
            socket.create_connection((found[1], int(found[2])), timeout=CONNECT_S).close()
        except OSError as error:
            raise no_scheduler(address, error) from error


CONNECT_S = 10.0  # for a connection to a scheduler
_GUARD = 'if __name__ == "__main__":'


def check_main() -> None:
    """Raise ConfigError if workers cannot import the main program or would start the run again."""
    main = sys.modules.get("__main__")
    name = getattr(main, "__file__", None)
    if main is None or name is None or _interactive(main):
        return
    if main.__spec__ is not None and f".{main.__spec__.name}".endswith(".__main__"):
        return  # python -m PACKAGE, or an archive: worker processes leave its __main__ out
    file = Path(name)
    if not file.is_file():
        raise ConfigError(
            f"libra.train: this program is read from {name!r}, not from a file, and worker processes cannot import it; save it as "
            f"a file, e.g. train.py, put {_GUARD} around the call, and type python train.py"
        )
    line = _line_in_main(vars(main))
    if line is not None and not _is_guarded(file, line):
        raise ConfigError(
            f"libra.train: {file}, line {line}: each worker process imports this file and would start the run again; put "
            f"{_GUARD} before the call, and the call under it"
        )


def _interactive(main: object) -> bool:
    return bool(getattr(sys, "ps1", None)) or hasattr(main, "__IPYTHON__") or "get_ipython" in vars(main)


def _line_in_main(names: dict[str, object]) -> int | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (frame.f_globals is names and frame.f_code.co_name == "<module>"):
        frame = frame.f_back
    return None if frame is None else frame.f_lineno


def _is_guarded(file: Path, line: int) -> bool:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # not Python's own syntax: a runner has translated it
        return True
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and any(getattr(each, "id", "") == "__name__" for each in ast.walk(node.test)):
            if node.lineno <= line <= (node.end_lineno or node.lineno):
                return True
            leaves = isinstance(node.body[-1], ast.Raise | ast.Expr)  # raise SystemExit, or sys.exit()
            if node.lineno < line and leaves and any(isinstance(each, ast.NotEq) for each in ast.walk(node.test)):
                return True
    return False
