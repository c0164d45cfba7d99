"""`libra repair RUN`: quarantines damaged files, and rebuilds them from copies of their content.

1. Nothing is deleted: replaced files go to ``damaged/`` in the run directory.
2. No driver or committer has the run meanwhile; repair holds both locks.
3. A second repair does nothing; a killed repair is continued by the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from libra.config import RunConfig, resolve_model
from libra.config.load import load_resumed
from libra.config.service_devices import teacher_model
from libra.driver.damage import drop_dead_link, quarantine
from libra.driver.repair_store import repair_store
from libra.driver.rundir import lock_run
from libra.envs import decode_state
from libra.errors import LibraError, StoreError, shell_path
from libra.facts import OpenBatch
from libra.policy import staleness_of
from libra.seals import parsed_json, sealed_text, unseal
from libra.store.event_log import lines_of
from libra.store.exclusive_files import CommitterLock, create_exclusive, lock_holder
from libra.store.run_files import (
    EVENTS,
    KINDS,
    METRICS,
    SCORES,
    SEGMENTS,
    STORE,
    RunCheck,
    check_run,
    existing_run,
    is_object,
)
from libra.store.run_records import (
    commit_batch,
    evaluation_path,
    group_path,
    groups_of,
    read_group,
    read_waves,
    write_group,
    write_scores,
)
from libra.store.start_records import (
    CONFIG_FILE,
    GIVEN_FILE,
    STARTS_FILE,
    config_digest,
    epochs_in,
    read_given,
    read_starts,
    write_given,
)
from libra.store.trajectory_journal import Journal
from libra.store.trajectory_store import TrajectoryStore
from libra.types import Trajectory, TrajectoryId
from libra.worker.model_files import local_model
from libra.worker.run_spec import RunDirectory, RunSpec
from libra.worker.trajectory.graded_members import grade
from libra.worker.trajectory.trajectory_state import TrajectoryRules, TrajectoryState

if TYPE_CHECKING:
    from libra.types import Taught

STORE_WAIT_S = 20.0
"""Seconds that a repair waits until the workers of a killed driver have closed the store."""
MOST_ROUNDS = 4
"""One file may be rebuilt only after another one."""


@dataclass(frozen=True, slots=True)
class RepairResult:
    check: RunCheck
    num_repaired: int


def repair_run(directory: Path, say: Callable[[str], None]) -> RepairResult:
    """Repair a run; ``say`` receives a line per repair and per file that cannot be repaired.

    Raises RunDirectoryError if a driver has the run or it is missing, StoreError if a committer has
    it.
    """
    run = existing_run(directory)
    driver = lock_run(run)
    try:
        committer = _store_lock(directory, run / STORE, say)
        try:
            num_repaired, reasons = 0, dict[str, str]()
            for _ in range(MOST_ROUNDS):
                check = check_run(directory)
                round_ = _Round(check, say)
                reasons = round_.repair()
                num_repaired += round_.num_done
                if not round_.num_done:
                    break
        finally:
            committer.release()
    finally:
        driver.release()
    for name, reason in reasons.items():
        say(f"{name}: cannot be repaired: {reason}")
    return RepairResult(check, num_repaired)


def _store_lock(typed: Path, store: Path, say: Callable[[str], None]) -> CommitterLock:
    until_s, waits = time.monotonic() + STORE_WAIT_S, False
    while True:
        try:
            return CommitterLock(store)
        except StoreError as error:
            holder = lock_holder(store)
            if time.monotonic() >= until_s:
                if holder is None:  # a file system without locks
                    raise
                raise StoreError(
                    f"{typed}: process {holder.pid} on {holder.host} still has the store open: a worker of an earlier start, whose "
                    f"driver has ended. Type kill {holder.pid} on {holder.host} (its nanny, if it has one, starts it again), then "
                    f"libra repair {shell_path(typed)} again"
                ) from error
        if holder is not None and not waits:
            waits = True
            say(
                f"waiting until a worker of an earlier start has closed the store (process {holder.pid} on {holder.host})"
            )
        time.sleep(0.2)


class _Round:
    """Repairs after one check; a repair that raises a LibraError is impossible in this round."""

    def __init__(self, check: RunCheck, say: Callable[[str], None]) -> None:
        self.check, self.run, self._say = check, check.run, say
        self.files = RunDirectory(check.run)
        self.num_done = 0

    def repair(self) -> dict[str, str]:
        """Repair each damaged file; returns the reason per file that cannot be repaired."""
        reasons = dict[str, str]()
        names = dict.fromkeys(damage.name for damage in self.check.damages)
        for kind, repair in REPAIRS.items():
            mine = [name for name in names if name.split("/")[0].removesuffix(".digests") == kind]
            for name in [STORE] if mine and kind == STORE else mine:
                try:
                    repair(self, name)
                except LibraError as error:
                    reasons[name] = str(error)
        drop_dead_link(self.run)
        return reasons

    @cached_property
    def config(self) -> RunConfig:
        return load_resumed(self.run)

    def done(self, text: str) -> None:
        self.num_done += 1
        self._say(text)

    def replace(self, name: str, how: str, write: Callable[[], Any]) -> None:
        aside = quarantine(self.run, name)
        (self.run / name).parent.mkdir(exist_ok=True)
        write()
        self.done(f"{name}: {how}{aside and f'; the old one is {aside}'}")

    def remove(self, name: str, then: str) -> None:
        if aside := quarantine(self.run, name):
            self.done(f"{name}: moved to {aside}; {then}")

    def quarantine(self, name: str) -> None:
        parts = name.split("/")
        for kind in KINDS:
            if kind.quarantined and kind.pattern.split("/")[0] == parts[0]:
                self.remove("/".join(parts[: kind.pattern.count("/") + 1]), kind.quarantined)

    def stored(self, split: str, **wanted: int) -> list[tuple[int, Trajectory]] | None:
        """The store's trajectories that match, each with its batch; None for a damaged store."""
        if any(damage.kind.startswith(STORE) for damage in self.check.damages):
            return None
        with TrajectoryStore.open(self.files.store_path) as opened:
            columns = opened.columns()
            mask = columns["split"] == split
            for name, value in wanted.items():
                mask &= columns[name] == value
            return [(int(columns["batch"][row]), opened.trajectory(int(row))) for row in np.flatnonzero(mask)]

    # -------------------------------------------------------------------------------------------- starts and logs

    def given(self, name: str) -> None:
        starts, config = read_starts(self.run), self.run / CONFIG_FILE
        if not starts or not config.is_file() or config_digest(config.read_bytes()) != starts[-1]["config"]:
            raise StoreError(f"{STARTS_FILE} and {CONFIG_FILE}, which have the same facts, do not agree or are gone")
        facts = {key: starts[-1][key] for key in ("environment", "score")}
        how = f"made again from {STARTS_FILE} and {CONFIG_FILE}"
        self.replace(name, how, lambda: write_given(self.run, config.read_text(), **facts))

    def configuration(self, name: str) -> None:
        text = read_given(self.run)["config"]
        self.replace(name, "as the run was started with", lambda: (self.run / name).write_text(text))

    def starts(self, name: str) -> None:
        given, path, lines = read_given(self.run), self.run / name, dict[int, str]()
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                lines[int(unseal(line)["epoch"])] = line.decode()
        facts = {**given, "config": config_digest(given["config"])}
        for epoch in range(max([self.check.epoch, *epochs_in(self.files.epochs_dir)]) + 1):
            lines.setdefault(epoch, sealed_text({**facts, "epoch": epoch}))
        text = "".join(f"{lines[epoch]}\n" for epoch in sorted(lines))
        how = f"made again from its sound lines, {GIVEN_FILE} and epochs/"
        self.replace(name, how, lambda: path.write_text(text))

    def epochs(self, name: str) -> None:
        directory = self.files.epochs_dir
        have = epochs_in(directory)
        margin = not have and not (self.run / STARTS_FILE).exists()  # a start may have left no record
        top = max([self.check.epoch, *have]) + margin
        for epoch in set(range(top + 1)) - have:
            create_exclusive(directory / f"{epoch:04d}", b"", fsync=True)
        extra = ", and one more for a start that left no record" if margin else ""
        self.done(f"epochs: 0 to {top} are there again, by the records of the run{extra}; the next start is {top + 1}")

    def log(self, name: str) -> None:
        lines = (self.run / name).read_bytes().splitlines(keepends=True)
        sound = [line for line in lines if is_object(line)]
        how = f"{len(lines) - len(sound)} of {len(lines)} lines left out"
        self.replace(name, how, lambda: (self.run / name).write_bytes(b"".join(sound)))

    def segment(self, name: str) -> None:
        raise StoreError("nothing else has its lines; a resumed run does not need them, and it stays where it is")

    def wave(self, name: str) -> None:
        for path in sorted((self.run / "waves").glob(f"{Path(name).name.rpartition('-')[0]}-*.json")):
            if (later := f"waves/{path.name}") >= name:
                self.remove(later, "its groups go into other waves, if their step is not taken yet")

    # -------------------------------------------------------------------------------------------- trajectories

    def store(self, name: str) -> None:
        repair_store(self.files, self.done)

    def journal(self, name: str) -> None:
        trajectory, first = Path(name).name.rsplit(".", 2)[:2]
        later = [path.name for path in sorted((self.run / "journal").glob(f"{trajectory}.*.rec"))]
        asides = [quarantine(self.run, f"journal/{each}") for each in later if each.rsplit(".", 2)[1] >= first]
        split, iteration, group, _ = trajectory.split("-")
        graded = group_path(self.files.groups_dir, int(iteration), int(group), split).exists()
        then = "its group is on record" if graded else "they run again, with the same seeds"
        self.done(f"journal/{trajectory}: quanta from {int(first)} on are moved to {', '.join(asides)}; {then}")

    def group(self, name: str) -> None:
        """Rebuild a group record from the store, or else regrade it from the journal.

        A record without a batch is only quarantined: a resumed run grades or runs its group again.
        """
        split, iteration, group = Path(name).stem.split("-")
        key = TrajectoryId(int(iteration), int(group), 0, split)
        size = self.config.trainer.group_size if split == "train" else 1
        found = self.stored(split, iteration=key.iteration, group=key.group) or []
        members, how = [each for _, each in found], "made again from the store"
        if len(members) != size:
            if not any(Path(name).name in names for names in self.check.groups.values()):
                then = "its trajectories are graded again, or run again, when the run is resumed"
                self.remove(name, then)
                return
            members, how = self._graded(key, size), "made again from the journal, and graded again"
        for member in members:
            member.advantage = 0.0  # a batch sets it
        args = self.files.groups_dir, key.iteration, key.group, members
        self.replace(name, how, lambda: write_group(*args, fsync=True))

    def _graded(self, key: TrajectoryId, size: int) -> list[Trajectory]:
        given, config = read_given(self.run), self.config
        if given["environment"] or given["score"]:
            raise StoreError("its rewards came from Python objects, which only the program that started the run has")
        journal = Journal(self.files.journal_dir)
        environment = RunSpec(self.run.name, 0, self.run, "", config).make_environment()
        rules = TrajectoryRules.of(config, environment)
        index = key.group + (key.iteration * config.trainer.prompts if key.split == "train" else 0)
        prompt, decode = environment.prompt(key.split, index), partial(decode_state, environment)
        pairs = []
        for tid in (key._replace(sample=sample) for sample in range(size)):
            state = TrajectoryState(tid, prompt, rules)
            for record in journal.read(str(tid)):
                state.apply(record)
            if state.end is None:
                raise StoreError(f"neither the store nor the journal has all of {tid}")
            epoch = max(record.epoch for record in state.records)
            pairs.append((state.trajectory(epoch), state.episode(decode)))

        async def grade_all() -> None:
            await environment.setup()
            try:
                trainer = config.trainer
                await asyncio.gather(
                    *(grade(environment, trainer.resample, *pair, late=trainer.late) for pair in pairs)
                )
            finally:
                await environment.close()

        asyncio.run(grade_all())
        return [member for member, _ in pairs]

    # -------------------------------------------------------------------------------------------- batches and outcomes

    def batch(self, name: str) -> None:
        """Rebuild a batch: members from store or event log, advantages from their rewards."""
        from libra.graph.member_rows import member_rows  # brings torch

        number, config, files = int(Path(name).stem.split("-")[1]), self.config, self.files
        if config.trainer.late != "off":
            raise StoreError("which late rewards its batch took is recorded in no other file")
        members, how = [each for _, each in self.stored("train", batch=number) or []], "the store"
        groups: dict[tuple[int, int], list[Trajectory]] = {}
        for member in members:
            groups.setdefault((member.trajectory_id.iteration, member.trajectory_id.group), []).append(member)
        if not groups:
            how = "the event log and group records"
            groups = {
                group: read_group(group_path(files.groups_dir, *group)) for group in _opened_with(self.run, number)
            }
        if not groups:
            raise StoreError("neither the store nor the event log has its members")
        paths = [group_path(files.groups_dir, *group) for group in groups]
        rows = member_rows(config.trainer, [*groups.values()], paths, number, staleness_of(config))
        waves = [row for wave in read_waves(files.waves_dir, number) for row in wave]
        if groups_of(waves) == tuple(groups):  # a streamed step, which is repeated in the same waves
            rows = waves
        if members:
            for row, group in zip(rows, groups.values(), strict=True):
                row["advantages"] = [member.advantage for member in group]
        ids = [each.trajectory_id for group in groups.values() for each in group]
        self.replace(name, f"made again from {how}", lambda: commit_batch(files.batches_dir, number, ids, groups=rows))
        self.check.groups[number] = [path.name for path in paths]  # which may be repaired next

    def evaluation(self, name: str) -> None:
        """Rebuild an evaluation's outcome; if that fails, a resumed run evaluates again."""
        from libra.graph.batch_nodes import evaluation_outcome  # brings torch

        version = int(Path(name).stem.split("-")[1])
        found = self.stored("eval", iteration=version)
        if found is None:
            raise StoreError("the store, which has its trajectories, is damaged too")
        members = sorted((each for _, each in found), key=lambda member: member.trajectory_id)
        if len(members) != self.config.evaluation.prompts:
            self.remove(name, "the store does not have its trajectories")
            return
        text = sealed_text(evaluation_outcome(version, members)).encode()
        self.replace(name, "made again from the store", lambda: create_exclusive(self.run / name, text, fsync=True))

    def checkpoint(self, name: str) -> None:
        """Quarantine a checkpoint, or rebuild the scores of all from evaluations or metrics."""
        if name != SCORES:
            self.quarantine(name)
            return
        evaluated = bool(self.config.evaluation.every)
        rewards = (
            {step: self._evaluated(step) for step in self.check.whole_checkpoints} if evaluated else self._trained()
        )
        scores = {
            f"step-{step:06d}": float(reward)
            for step in sorted(self.check.whole_checkpoints)
            if (reward := rewards.get(step)) is not None and math.isfinite(reward)
        }
        how = f"made again from {'evaluations' if evaluated else 'metrics'}"
        self.replace(name, how, lambda: (self.run / name).write_text(sealed_text(scores) + "\n"))

    def _evaluated(self, step: int) -> float | None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return unseal(evaluation_path(self.files.evaluations_dir, step).read_bytes())["reward"]  # type: ignore[no-any-return]
        return None

    def _trained(self) -> dict[int, float]:
        found = {}
        for line in (self.run / METRICS).read_text().splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                values = parsed_json(line)
                found[int(values["step"]) + 1] = float(values["reward"])
        return found

    # -------------------------------------------------------------------------------------------- scores of a teacher

    def teacher(self, name: str) -> None:
        """Rebuild teacher scores that a batch used; a resume recomputes others."""
        stem = Path(name).stem
        if f"{stem}.group" not in {each for names in self.check.taught.values() for each in names}:
            self.remove(name, "the teacher scores its group again when the run is resumed, if a batch is to have it")
            return
        split, iteration, group = stem.split("-")
        found = [each for _, each in self.stored(split, iteration=int(iteration), group=int(group)) or []]
        scores: Sequence[Taught | None] = [
            each.taught for each in sorted(found, key=lambda each: each.trajectory_id.sample)
        ]
        how = "made again from the store"
        if not any(scores):
            scores, how = self._asked(stem), f"{teacher_model(self.config)} was asked again"
        self.replace(name, how, lambda: write_scores(self.run / name, scores))

    @cached_property
    def _teacher(self) -> Any:
        from libra.worker.services.service_models import load_teacher  # brings torch

        return load_teacher(self.config, Path(local_model(str(resolve_model(self.config.model.path)))))

    def _asked(self, stem: str) -> Sequence[Taught | None]:
        from libra.worker.services.service_models import scores_of

        members = read_group(self.files.groups_dir / f"{stem}.group")
        return scores_of(self._teacher, self.config.run.seed, members).taught


def _opened_with(run: Path, number: int) -> list[tuple[int, int]]:
    for line in lines_of(run / EVENTS, OpenBatch):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            values = parsed_json(line)
            if values["batch"] == number and values["members"]:
                return [(int(iteration), int(group)) for iteration, group in values["members"]]
    return []


REPAIRS: dict[str, Callable[[_Round, str], None]] = {
    GIVEN_FILE: _Round.given,
    CONFIG_FILE: _Round.configuration,
    STARTS_FILE: _Round.starts,
    "epochs": _Round.epochs,
    METRICS: _Round.log,
    EVENTS: _Round.log,
    SEGMENTS: _Round.segment,
    "weights": _Round.quarantine,
    "steps": _Round.quarantine,
    "observations": _Round.quarantine,
    "waves": _Round.wave,
    "batches": _Round.batch,
    STORE: _Round.store,
    "groups": _Round.group,
    "teacher": _Round.teacher,
    "journal": _Round.journal,
    "evaluations": _Round.evaluation,
    "checkpoints": _Round.checkpoint,
}
"""The first part of a path, and the repair of a damaged file there. Later ones read what earlier ones made."""
