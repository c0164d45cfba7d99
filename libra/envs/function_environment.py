"""An environment from plain Python: prompts, a reward function, and functions as tools."""

from __future__ import annotations

import inspect
import io
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from libra.envs.environment import Environment
from libra.envs.rewards.reward_calls import OWN, Given, read_rewards
from libra.envs.tool import SessionKind, Tool, tool
from libra.errors import ConfigError
from libra.seals import parsed_json
from libra.types import Episode, Prompt

logger = logging.getLogger(__name__)

HELD_OUT_EVERY = 10
"""Without ``eval_prompts``, rows 9, 19, 29, ... are for evaluation only."""
MOST_READ, MOST_CHARS = 1_000_000, 1 << 30
"""Most prompts and characters from an iterator, which may be endless."""
TRUTHS_READ = 64
"""Prompts of which a named reward must be able to read at least one answer."""


class FunctionEnvironment(Environment):
    """The environment behind ``libra.train(prompts=..., reward=..., tools=[...])``.

    Training prompts repeat; the seed shuffles each pass. Evaluation prompts are ``eval_prompts`` in
    their order, or else every tenth of ``prompts``; fewer than ten prompts give none.

    Parameters
    ----------
    prompts, eval_prompts : iterable, or a table of pandas, polars, pyarrow, datasets or Dask
        A row is a str (one user message), a list of messages, or a mapping with "prompt" (a str or
        list of messages) and further columns, JSON-able facts of the prompt. An iterator has at
        most `MOST_READ` rows.
    reward : callable, str, mapping, or a list of them
        A name of `libra.envs.rewards`, such as "gsm8k", a mapping with "name" and options,
        ``{"service": "judge"}`` for a service's number, or a function. A function takes by name any
        of ``prompt`` (`Prompt`), ``completion`` (text of the last turn), ``episode`` (`Episode`),
        and any column that every row has. It returns one finite number, and may be ``async``.
        Functions of TRL and verifiers are recognised by their parameters
        (`libra.envs.rewards.reward_calls`).
    tools : sequence of functions or `Tool`
    session : SessionKind, optional
        Kind of session (`libra.session`) for tools with a keyword ``session``.
    system : str, optional
        System message for prompts without one.

    Raises
    ------
    ConfigError
        A malformed prompt, a parameter of ``reward`` that no row has, a named reward that can read
        none of the first 64 answers, or a tool without docstring or type hints.
    """

    def __init__(
        self, *, prompts: Iterable[Any], reward: Given, tools: Sequence[Callable[..., Any] | Tool] = (),
        session: SessionKind | None = None, system: str | None = None, eval_prompts: Iterable[Any] | None = None,
        seed: int = 0,
    ) -> None:  # fmt: skip
        prompts = _listed_rows(prompts, "prompts")
        rows = [_row(given, f"prompts[{index}]", system) for index, given in enumerate(prompts)]
        if not rows:
            raise ConfigError("prompts: got none; give at least one str, list of messages, or mapping with 'prompt'")
        self.seed = seed
        self.tools = _tools(tools)
        self.session = session
        if session is not None and not any(given.takes_session for given in self.tools):
            raise ConfigError(
                "session: no tool takes it; give a tool the keyword session, as def click(selector: str, session: Browser) -> str, "
                "or leave session out"
            )
        self._train, self._eval = rows, rows[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        if eval_prompts is not None:
            held_out = _listed_rows(eval_prompts, "eval_prompts")
            self._eval = [_row(given, f"eval_prompts[{index}]", system) for index, given in enumerate(held_out)]
        else:
            self._train = [row for index, row in enumerate(rows) if (index + 1) % HELD_OUT_EVERY]
        self._num_prompts = len(rows)
        columns = set.intersection(*(set(facts) for _, facts in self._train + self._eval))
        plain = all(isinstance(row.get("prompt") if isinstance(row, Mapping) else row, str) for row in prompts)
        self._reward = read_rewards(reward, columns, plain=plain)
        for each in (rows, self._eval):
            self._reward.check_truths([facts for _, facts in each[:TRUTHS_READ]])
        self.services = self._reward.services
        repeated = sum(row in self._train for row in self._eval)
        if repeated:
            logger.warning("%d of %d evaluation prompts are also training prompts", repeated, len(self._eval))

    def prompt(self, split: str, index: int) -> Prompt:
        self.check_split(split)
        rows = self._train if split == "train" else self._eval
        if not rows:
            raise ConfigError(
                f"no evaluation prompts: got {self._num_prompts} prompts, and one in {HELD_OUT_EVERY} is held out; "
                f"give eval_prompts=[...], or {HELD_OUT_EVERY} prompts or more, or type evaluation.prompts=0"
            )
        row_index = self._row_index(index) if split == "train" else index % len(rows)
        return Prompt(f"{split}-{row_index}", *rows[row_index])

    def prompt_id(self, split: str, index: int) -> str:
        return f"train-{self._row_index(index)}" if split == "train" else ""

    def num_prompts(self, split: str) -> int:
        return len(self._train if split == "train" else self._eval)

    def _row_index(self, index: int) -> int:
        turn, position = divmod(index, len(self._train))
        return _order(self.seed, turn, len(self._train))[position]

    @property
    def graders(self) -> tuple[Callable[..., Any], ...]:
        """The reward functions, for messages."""
        return tuple(term.function for term in self._reward.terms)

    def grade(self, episode: Episode) -> float:
        return self._reward(episode)


@lru_cache(maxsize=4)
def _order(seed: int, turn: int, num_rows: int) -> tuple[int, ...]:
    order = list(range(num_rows))
    random.Random(f"functional/{seed}/{turn}").shuffle(order)
    return tuple(order)


Row = tuple[tuple[Mapping[str, str], ...], Mapping[str, Any]]


def _listed_rows(given: Any, where: str) -> list[Any]:
    if isinstance(given, str | bytes | Mapping | set | frozenset | io.IOBase):
        raise ConfigError(f"{where}: got one {type(given).__name__}; {_advice(given, where)}")
    for whole in ("compute", "collect"):  # a collection of Dask, a lazy frame of polars
        if hasattr(given, whole):
            given = getattr(given, whole)()
    if hasattr(given, "columns"):  # its iterator gives columns
        table = type(given).__name__
        methods = (("to_dicts", ()), ("to_pylist", ()), ("to_dict", ("records",)))  # polars, pyarrow, pandas
        rows_of = next((partial(getattr(given, name), *words) for name, words in methods if hasattr(given, name)), None)
        if rows_of is None:
            raise ConfigError(f"{where}: got {table}, a table of columns; give its rows as a list of dicts")
        given = rows_of()
    try:
        rest, endless = iter(given), not isinstance(given, Sized)
    except TypeError as error:
        raise ConfigError(f"{where}: got {type(given).__name__} without rows; give a list: {where}=[...]") from error
    if not endless:
        return list(islice(rest, len(given)))
    rows, chars = list[Any](), 0
    for row in rest:
        chars += len(str(row))
        if len(rows) >= MOST_READ or chars > MOST_CHARS:
            raise ConfigError(
                f"{where}: read {len(rows):,} prompts from a {type(given).__name__}, which goes on; all are kept in memory; type "
                f"{where}=list(itertools.islice(PROMPTS, 100_000)) with the number that you want"
            )
        rows.append(row)
    return rows


def _advice(given: Any, where: str) -> str:
    if isinstance(given, io.IOBase):
        return f"give its lines, as {where}=[json.loads(line) for line in FILE]"
    if isinstance(given, Mapping) and given and not any(isinstance(value, str) for value in given.values()):
        if any(hasattr(value, "column_names") or hasattr(value, "columns") for value in given.values()):
            return f"give one of its splits, as {where}=GIVEN[{next(iter(given))!r}]"
        return f"give its rows, as {where}=[dict(zip(GIVEN, row)) for row in zip(*GIVEN.values())]"
    return f"give a list of prompts, e.g. {where}=[...]"


def _row(given: Any, where: str, system: str | None) -> Row:
    facts: dict[str, Any] = {}
    if isinstance(given, Mapping):
        if "prompt" not in given:
            raise ConfigError(f"{where}: no 'prompt' among its columns {sorted(map(str, given))}; rename one")
        facts = {key: _plain(value) for key, value in given.items() if key != "prompt"}
        for name in facts:
            if name in OWN:
                raise ConfigError(f"{where}: the column {name!r} has the name of an argument of rewards; rename it")
            if not isinstance(name, str):
                raise ConfigError(f"{where}: the name of the column {name!r} is not text; rename it")
        given = given["prompt"]
    given = _plain(given)
    if isinstance(given, str):
        if not given.strip():
            raise ConfigError(f"{where}: the prompt is empty; give a question, or leave it out")
        messages = [{"role": "user", "content": given}]
    elif isinstance(given, Sequence) and given and all(_is_message(item) for item in given):
        messages = [dict(item) for item in given]
    else:
        shown = repr(given)[:120]
        raise ConfigError(f"{where}: got {shown}; a prompt is a str, or a list of {{'role': str, 'content': str}}")
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return tuple(messages), facts


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _is_message(item: object) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)


def _tools(given: Any) -> tuple[Tool, ...]:
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        name = getattr(given, "__name__", repr(given)[:60])
        raise ConfigError(f"tools: got {name} ({type(given).__name__}); give a list of functions: tools=[FUNCTION]")
    for index, each in enumerate(given):
        where, name = f"tools[{index}]: got", getattr(each, "__name__", "")
        if inspect.isclass(each):
            raise ConfigError(f"{where} the class {name}; give a function, or an instance: tools=[{name}()]")
        if not callable(each) and not isinstance(each, Tool):
            raise ConfigError(
                f"{where} {repr(each)[:60]} ({type(each).__name__}); give the function itself, with type hints and a docstring: "
                "tools=[FUNCTION]"
            )
    tools = tuple(each if isinstance(each, Tool) else tool(each) for each in given)
    for name, count in Counter(each.name for each in tools).items():
        if count > 1:
            raise ConfigError(f"tools: two are called {name!r}; rename one with libra.envs.tool(f, name=...)")
    return tools


class JsonLines(FunctionEnvironment):
    """The environment registered as ``jsonl``.

    Parameters
    ----------
    path : str
        A file with one JSON object a line: "prompt" (a str or a list of messages), "answer", and
        further columns. All workers must be able to read it.
    reward : str, mapping or list
        A name of `libra.envs.rewards`, a mapping with options, "module:function" of a function for
        Libra, TRL or verifiers, or ``{function: module:function, weight: 0.5, form: trl}``; a list
        is a sum.
    eval_path : str, optional
        Held-out questions instead of every tenth line of ``path``.
    prompt, answer : str
        Columns of question and answer.
    system : str, optional
        System message for questions without one.

    Raises
    ------
    ConfigError
        An unreadable file, a line that is not an object or lacks a column, or a wrong reward.
    """

    def __init__(
        self, *, path: str, reward: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
        eval_path: str | None = None, prompt: str = "prompt", answer: str = "answer", system: str | None = None,
        seed: int = 0,
    ) -> None:  # fmt: skip
        columns = {"prompt": prompt, "answer": answer}
        rows = _file_rows(path, "path", columns)
        held_out = None if eval_path is None else _file_rows(eval_path, "eval_path", columns)
        try:
            super().__init__(prompts=rows, eval_prompts=held_out, reward=reward, system=system, seed=seed)
        except ConfigError as error:
            raise ConfigError(f"environment.args.{error}") from error

    @staticmethod
    def check_files(*, path: str, eval_path: str | None = None, **_: Any) -> None:
        """ConfigError for a file that cannot be opened."""
        for argument, file in (("path", path), ("eval_path", eval_path)):
            if file is not None:
                with _reading(file, argument):
                    Path(file).open("rb").close()


@contextmanager
def _reading(path: str, argument: str) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        where = f"environment.args.{argument}"
        raise ConfigError(
            f"{where}: cannot read {path!r} ({getattr(error, 'strerror', None) or error}); type {where}=FILE with the path of a "
            "file of JSON lines"
        ) from error


def _file_rows(path: str, argument: str, columns: Mapping[str, str]) -> list[dict[str, Any]]:
    where = f"environment.args.{argument}: {path}"
    with _reading(path, argument):
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = parsed_json(line)
            if not isinstance(row, dict):
                raise TypeError(f"got {type(row).__name__}")
        except (ValueError, TypeError) as error:
            reason = f"not JSON ({error})" if isinstance(error, ValueError) else error
            raise ConfigError(f"{where}, line {number}: {reason}; every line is one JSON object") from error
        for key, column in columns.items():
            if column not in row:
                raise ConfigError(
                    f"{where}, line {number}: no column {column!r} among {sorted(row)}; "
                    f"type environment.args.{key}=NAME with the name of that column"
                )
        others = {name: value for name, value in row.items() if name not in columns and name not in columns.values()}
        rows.append(others | {key: row[column] for key, column in columns.items()})
    if not rows:
        raise ConfigError(f"{where} has no question; write at least one, a JSON object a line")
    return rows
