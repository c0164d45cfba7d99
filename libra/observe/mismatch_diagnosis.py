"""`libra diagnose RUN`: where a mismatch of engine and trainer began, from the run's files alone.

It reads the step records (``RUN/steps``), version checks in the event log, and token texts in the
store. A step is *above* if k3 of all its tokens, or of an engine or length class with enough
tokens, exceeds a threshold: the given one, ``trainer.mismatch_args.k3``, or `FACTOR` times the
median of the first `FIRST_STEPS` steps. The first such step starts the mismatch. Step s trains
version s; only tokens of version s count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from libra.config.trainer import FEWEST_MISMATCH_TOKENS
from libra.errors import ConfigError, ModelError, StoreError
from libra.observe.run_directory import check_run_directory, finite, read_config, setting
from libra.observe.trajectory_view import Decode, load_decode
from libra.seals import unseal
from libra.store.event_log import EventReader
from libra.store.trajectory_store import TrajectoryStore
from libra.types import TrajectoryId

FACTOR: Final = 100.0
"""Default threshold over k3 of the first steps; the gap is then ten times theirs."""
FIRST_STEPS: Final = 5
CONTEXT_TOKENS: Final = 24
"""Context tokens shown before a token."""
CHECKS: Final = ("version_rechecked", "engine_quarantined")
_ALL: Final = "all tokens"


@dataclass(frozen=True, slots=True)
class SuspectPart:
    """An engine, a length class or all tokens: figures of the first step above, and the last k3."""

    name: str
    first_step: int
    k3: float
    mean_abs: float
    tokens: int
    last_k3: float


@dataclass(frozen=True, slots=True)
class SuspectToken:
    """A token with a large gap, its ``text``, and the text ``before`` it (None if unknown)."""

    step: int
    trajectory: str
    token: int
    token_id: int
    engine: str
    rollout: float
    trainer: float
    text: str | None = None
    before: str | None = None


@dataclass(frozen=True, slots=True)
class LayerFinding:
    """A layer that failed an engine's checks, at a load (``loading``) or before leaving a version.

    Method, gap and tolerance are of the first failure, at ``version``.
    """

    worker: str
    layer: str
    loading: bool
    method: str
    version: int
    gap: float | None
    tolerance: float
    last_version: int
    checks: int = 1


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Result of `diagnose`.

    ``threshold`` is k3 in nats. ``steps`` counts steps with tokens of the trained version;
    ``first`` and ``last`` are the steps above (None without any). ``checked`` counts passed checks
    of suspected engines from ``first`` on, before they left a version. ``damaged`` names bad
    records.
    """

    threshold: float
    threshold_from: str
    steps: int
    first: int | None = None
    last: int | None = None
    parts: list[SuspectPart] = field(default_factory=list)
    tokens: list[SuspectToken] = field(default_factory=list)
    layers: list[LayerFinding] = field(default_factory=list)
    checked: int = 0
    damaged: list[str] = field(default_factory=list)


def diagnose(run_dir: Path, *, above: float | None = None, num_tokens: int = 5) -> Diagnosis:
    """Where a run's mismatch began; ``above`` is the threshold of k3 in nats.

    ConfigError or RunDirectoryError if ``run_dir`` has no run, or no record of trained tokens.
    """
    directory = check_run_directory(run_dir, "diagnose")
    records, damaged = _records(directory)
    if not records:
        raise ConfigError(
            f"{directory}: no step of it has a record of the mismatch: it took none, or trained only on tokens of older versions"
            + (f"; damaged: {', '.join(damaged)}" if damaged else "")
        )
    threshold, origin = _threshold(read_config(directory), records, above)
    steps, parts = _suspects(records, threshold)
    found = Diagnosis(threshold, origin, len(records), damaged=damaged)
    if not steps:
        return found
    engines = {part.name.removeprefix("engine ") for part in parts if part.name.startswith("engine ")}
    layers, passed = _layers(directory, steps[0], engines)
    tokens = _with_text(directory, _tokens(records, {steps[0], steps[-1]}, engines, num_tokens))
    return replace(found, first=steps[0], last=steps[-1], parts=parts, tokens=tokens, layers=layers, checked=passed)


def _records(directory: Path) -> tuple[dict[int, dict[str, Any]], list[str]]:
    found, damaged = dict[int, dict[str, Any]](), list[str]()
    for path in sorted((directory / "steps").glob("step-*.json")):
        try:
            record = unseal(path.read_bytes())
            step, tokens = int(record["step"]), int(record.get("mismatch_tokens", 0))
        except (OSError, ValueError, KeyError, TypeError):
            damaged.append(path.name)
            continue
        if tokens and finite(record.get("mismatch_k3")) is not None:
            found[step] = record
    return dict(sorted(found.items())), damaged


def _threshold(
    config: Mapping[str, Any], records: Mapping[int, Mapping[str, Any]], above: float | None
) -> tuple[float, str]:
    if above is not None:
        return above, "as given"
    alarm = finite((setting(config, "trainer", "mismatch_args") or {}).get("k3"))
    if alarm is not None:
        return alarm, "trainer.mismatch_args.k3"
    first = [float(record["mismatch_k3"]) for record in list(records.values())[:FIRST_STEPS]]
    return FACTOR * median(first), f"{FACTOR:g} times the median of the first {len(first)} steps"


def _parts(record: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    whole = {name: record[f"mismatch_{name}"] for name in ("tokens", "k3", "mean_abs")}
    parts = record.get("mismatch_parts") or {}
    return {_ALL: whole} | {name: part for name, part in parts.items() if part["tokens"] >= FEWEST_MISMATCH_TOKENS}


def _suspects(records: Mapping[int, Mapping[str, Any]], threshold: float) -> tuple[list[int], list[SuspectPart]]:
    steps, found = [], dict[str, SuspectPart]()
    last = _parts(records[max(records)])
    for step, record in records.items():
        above = {name: part for name, part in _parts(record).items() if part["k3"] > threshold}
        steps += [step] if above else []
        for name, part in above.items():
            at_last = float(last[name]["k3"]) if name in last else float("nan")
            suspect = SuspectPart(name, step, float(part["k3"]), float(part["mean_abs"]), int(part["tokens"]), at_last)
            found.setdefault(name, suspect)
    kinds = ("engine", _ALL.split()[0], "length")
    order = sorted(found.values(), key=lambda part: (kinds.index(part.name.split()[0]), part.first_step, -part.k3))
    return steps, order


def _layers(directory: Path, first: int, engines: set[str]) -> tuple[list[LayerFinding], int]:
    found, passed = dict[tuple[str, str, bool], LayerFinding](), 0
    # Read as much of the log as possible; libra doctor names the damage.
    with contextlib.suppress(StoreError, KeyError, TypeError):
        for _, event in EventReader(directory / "events.jsonl"):
            if event.get("name") not in CHECKS or event["version"] < first:
                continue
            if event.get("passed"):
                passed += event["worker"] in engines
                continue
            key = event["worker"], event["layer"], event["name"] == "engine_quarantined"
            version, checks = event["version"], found[key].checks + 1 if key in found else 1
            first_one = found.get(key) or LayerFinding(
                *key, event["method"], version, event["gap"], event["tolerance"], version
            )
            found[key] = replace(first_one, last_version=version, checks=checks)
    return list(found.values()), passed


def _tokens(
    records: Mapping[int, Mapping[str, Any]], steps: set[int], engines: set[str], num: int
) -> list[SuspectToken]:
    found = []
    for step in sorted(steps):
        worst = [SuspectToken(step, **token) for token in records[step].get("mismatch_worst", ())]
        found += [token for token in worst if not engines or token.engine in engines][:num]
    return found


def _with_text(directory: Path, tokens: Iterable[SuspectToken]) -> list[SuspectToken]:
    found = list(tokens)
    try:
        decode, store = load_decode(directory), TrajectoryStore.open(directory / "trajectories.zarr")
        columns = store.columns()
    except (ModelError, StoreError):
        return found
    ids = zip(*(columns[name].tolist() for name in ("iteration", "group", "sample", "split")), strict=True)
    places = {str(TrajectoryId(*each)): row for row, each in enumerate(ids)}
    return [_spelled(token, store, places.get(token.trajectory), decode) for token in found]


def _spelled(token: SuspectToken, store: TrajectoryStore, row: int | None, decode: Decode) -> SuspectToken:
    if row is None:
        return token
    ids = store.trajectory(row).token_ids
    if not 0 <= token.token < len(ids) or int(ids[token.token]) != token.token_id:
        return token  # the store has another attempt of this trajectory
    before = decode(ids[max(0, token.token - CONTEXT_TOKENS) : token.token].tolist())
    return replace(token, text=decode([token.token_id]), before=before)
