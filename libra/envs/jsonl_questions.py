"""Questions from a file of JSON lines, graded by a reward of the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from libra.envs.function_environment import FunctionEnvironment
from libra.errors import ConfigError
from libra.seals import parsed_json


class JsonLines(FunctionEnvironment):
    """The environment registered as ``jsonl``.

    Parameters
    ----------
    path : str
        A file with one JSON object a line: "prompt" (a str or a list of messages), "answer", and further columns. All workers
        must be able to read it.
    reward : str, mapping or list
        A name of `libra.envs.rewards`, with options, or "module:function" of a function of yours in Libra's, TRL's or verifiers'
        form, or ``{function: module:function, weight: 0.5, form: trl}``; a list is a sum.
    eval_path : str, optional
        Held-out questions. None: every tenth line of ``path``.
    prompt, answer : str
        The columns that hold question and answer.
    system : str, optional
        System message put before questions that have none.

    Raises
    ------
    ConfigError
        For a file that cannot be read, a line that is not an object or lacks a column, and a wrong reward.
    """

    def __init__(
        self,
        *,
        path: str,
        reward: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
        eval_path: str | None = None,
        prompt: str = "prompt",
        answer: str = "answer",
        system: str | None = None,
        seed: int = 0,
    ) -> None:
        columns = {"prompt": prompt, "answer": answer}
        rows = _rows(path, "path", columns)
        held_out = None if eval_path is None else _rows(eval_path, "eval_path", columns)
        try:
            super().__init__(prompts=rows, eval_prompts=held_out, reward=reward, system=system, seed=seed)
        except ConfigError as error:
            raise ConfigError(f"environment.args.{error}") from error

    @staticmethod
    def check_files(*, path: str, eval_path: str | None = None, **_: Any) -> None:
        """ConfigError for a file that cannot be opened."""
        for argument, file in (("path", path), ("eval_path", eval_path)):
            if file is not None:
                try:
                    Path(file).open("rb").close()
                except OSError as error:
                    raise _unreadable(file, argument, error) from error


def _unreadable(path: str, argument: str, error: Exception) -> ConfigError:
    where = f"environment.args.{argument}"
    return ConfigError(
        f"{where}: cannot read {path!r} ({getattr(error, 'strerror', None) or error}); type {where}=FILE with the path of a "
        "file of JSON lines"
    )


def _rows(path: str, argument: str, columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """The lines of a file, with their columns renamed to the keys of ``columns``."""
    where = f"environment.args.{argument}"
    rows: list[dict[str, Any]] = []
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, argument, error) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = parsed_json(line)
        except ValueError as error:
            raise ConfigError(
                f"{where}: {path}, line {number}: not JSON ({error}); every line is one JSON object"
            ) from error
        if not isinstance(row, dict):
            raise ConfigError(
                f"{where}: {path}, line {number}: got {type(row).__name__}; every line is one JSON object"
            )
        for key, column in columns.items():
            if column not in row:
                raise ConfigError(
                    f"{where}: {path}, line {number}: no column {column!r} among {sorted(row)}; "
                    f"type environment.args.{key}=NAME with the name of that column"
                )
        renamed = {column: key for key, column in columns.items()}
        others = {column: value for column, value in row.items() if column not in renamed and column not in columns}
        rows.append({**others, **{key: row[column] for column, key in renamed.items()}})
    if not rows:
        raise ConfigError(f"{where}: {path} has no question; write at least one, a JSON object a line")
    return rows
