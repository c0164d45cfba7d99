"""Gives workers' events to `libra.policy.liveness`, carries out its commands, words its reports.

Dask reports a worker as running before its plugins are set up, and even if a plugin fails, which
only the worker's log shows. Here the failure is an event, a terminal line and a dashboard row.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from libra import keys
from libra.cluster.readiness import NEEDED
from libra.errors import EngineError, shell_path
from libra.facts import SetupFailed, WorkerSetupFailed
from libra.policy.liveness import Liveness, MissingRoles, RolesBack, RolesMissing, RoleSupply, Stage
from libra.scheduler import scheduler_internals
from libra.scheduler.run_state import RunState

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, WorkerState


logger = logging.getLogger(__name__)

SENT_BY_DASK = (keys.GRADE, keys.TRAIN, keys.COMMIT, keys.TEACHER)  # not by the dispatcher
STUCK_S = 120.0  # a setup that takes longer may hang
WORK = {
    keys.ROLLOUT: "generates",
    keys.TOOL: "runs tool calls",
    keys.GRADE: "grades",
    keys.TRAIN: "trains",
    keys.COMMIT: "writes the store",
    keys.TEACHER: "holds the teacher",
}
"""Resources that a run needs, and the work of the workers that supply them."""


SETUP = ("failed", "setting_up")
STATUS_WORDS = {
    "failed": "{name} failed its setup ({detail})",
    "setting_up": "{name} is being set up",
    "quarantined": "the engine of {name} failed the version check",
    "out": "the engine of {name} failed the version check",
}


class _Present(NamedTuple):
    """A present worker, and its supply once it is ready; ``status`` may be Dask's."""

    ws: WorkerState
    supplies: set[str]
    status: str
    is_ready: bool
    detail: str
    again_s: float | None


class WorkerWatch:
    """The worker watch of a scheduler, for all runs; call `look` for each run twice a second."""

    def __init__(self, scheduler: Scheduler, liveness: Liveness) -> None:
        self._scheduler, self._liveness = scheduler, liveness
        self._held: dict[str, dict[str, int]] = {}  # withheld resources, by address
        self._roles: dict[str, MissingRoles] = {}
        for address, ws in scheduler.workers.items():
            liveness.joined(address, str(ws.name), (), time.monotonic())

    def joined(self, address: str, runs: list[str]) -> None:
        """A worker begins its setup for these runs; call it before Dask sends it a task."""
        name = scheduler_internals.worker_name(self._scheduler, address)
        if self._liveness.joined(address, name, runs, time.monotonic()):
            self._held[address] = scheduler_internals.hold_back(self._scheduler, address, SENT_BY_DASK)

    def left(self, address: str) -> None:
        self._held.pop(address, None)
        self._liveness.left(address, time.monotonic())

    def ready(self, state: RunState, address: str) -> None:
        self._supply(self._liveness.ready(state.run, address))

    def ended(self, run: str) -> None:
        self._roles.pop(run, None)
        self._supply(self._liveness.ended(run))

    def failed(self, state: RunState, fact: SetupFailed, address: str) -> None:
        """A worker's setup for a run failed; at the run's start this ends the run."""
        name, detail, ws = fact.worker, fact.detail, self._scheduler.workers.get(address)
        if ws is None or not self._liveness.joins(state.run, address):
            state.log.emit(WorkerSetupFailed(name, address, detail, None))
            return
        after_s = self._liveness.failed(state.run, address, detail, time.monotonic(), nanny=bool(ws.nanny))
        state.log.emit(WorkerSetupFailed(name, address, detail, after_s))
        state.workers.engines.pop(name, None)
        state.workers.served.pop(name, None)
        by_hand = f"type kill -9 {ws.pid} on {ws.host}"
        advice = f"Fix the cause, then {by_hand} {'' if ws.nanny else 'and start the worker again'}".strip()
        if after_s is not None:
            advice = f"It is restarted in {after_s:g} s; {by_hand} to restart it at once"
        text = f"run {state.run}: worker {name} ({address}) joined, but its setup failed: {detail}. {advice}"
        state.notices.warn(logger, f"{text}; its log has the traceback", logging.ERROR)

    def look(self, state: RunState, now_s: float | None = None) -> None:
        now_s = time.monotonic() if now_s is None else now_s
        for due in self._liveness.due(state.run, now_s):
            logger.warning("run %s: worker %s is restarted: %s", state.run, due.name, due.reason)
            self._scheduler.loop.add_callback(
                scheduler_internals.restart_worker, self._scheduler, due.address, f"libra-again-{state.run}"
            )
        roles = self._roles.setdefault(state.run, MissingRoles(WORK))
        lost, present = set(self._liveness.lost(now_s)), self._present(state.run, now_s)
        supplies = {each: self._role(state, each, lost & set(roles.had(each)), present) for each in WORK}
        for report in roles.look(now_s, supplies):
            if isinstance(report, RolesBack):
                again = " again" if report.again else ""
                text = f"{', '.join(report.resources)} is there{again} after {report.after_s:.0f} s: {', '.join(report.names)}"
            else:
                text = self._missing(state, report, sorted(lost & report.had), present)
            state.notices.warn(logger, f"run {state.run}: {text}")
        if not lost & set(roles.had(keys.ROLLOUT)):
            self._end_unservable(state, {each.ws.address for each in present if keys.ROLLOUT in each.supplies})

    def held(self) -> dict[str, dict[str, int]]:
        return {address: dict(resources) for address, resources in self._held.items()}

    def missing_work(self, run: str) -> str:
        """The first reported work that too few workers do, e.g. "nobody generates", or ""."""
        told = self._roles[run].told if run in self._roles else []
        return f"nobody {WORK[told[0]]}" if told else ""

    def _present(self, run: str, now_s: float) -> list[_Present]:
        found = []
        for ws in sorted(self._scheduler.workers.values(), key=lambda ws: str(ws.name)):
            at = self._liveness.of(run, ws.address)
            is_ready = at.stage is Stage.READY
            if at.stage is Stage.FAILED:
                status = "failed"
            elif at.quarantined:
                status = "out" if at.out else "quarantined"
            elif not is_ready:
                status = "setting_up"
            else:
                status = "ready" if ws in self._scheduler.running else ws.status.name
            again_s = None if at.restart_s is None else max(0.0, at.restart_s - now_s)
            resources = {**ws.resources, **self._held.get(ws.address, {})}
            supplies = {name for name, units in resources.items() if units}
            found.append(_Present(ws, supplies, status, is_ready, at.detail, again_s))
        return found

    def _role(self, state: RunState, resource: str, gone: set[str], present: list[_Present]) -> RoleSupply:
        wanted = 1
        if resource == keys.TEACHER:
            wanted = int(state.settings.distil.teacher is not None)
        elif resource == keys.TRAIN:
            wanted = state.settings.cluster.train_workers
        able = [p for p in present if resource in p.supplies]
        there = scheduler_internals.supply(self._scheduler, resource)
        barred = {"quarantined", "out"} if resource == keys.ROLLOUT else set()
        ready = (p for p in able if p.is_ready and p.ws.address in there and p.status not in barred)
        unready = [p for p in able if not p.is_ready]
        out = [p.ws.address for p in able if p.status == "out"] if barred else []
        cause = (*sorted(gone), *out, *(p.ws.address for p in unready))
        coming = bool(unready) and not any(p.status in ("failed", "out") for p in able)
        return RoleSupply(wanted, tuple(str(p.ws.name) for p in ready), cause, coming)

    def _supply(self, addresses: list[str]) -> None:
        for each in addresses:
            scheduler_internals.restore_supply(self._scheduler, each, self._held.pop(each, {}), f"libra-ready-{each}")

    def _end_unservable(self, state: RunState, engines: set[str]) -> None:
        out = self._liveness.out(state.run)
        if not engines or not out.keys() >= engines:
            return
        for key, ts in self._scheduler.tasks.items():
            if not isinstance(key, str) or ts.state != "no-worker" or not scheduler_internals.is_parked(ts):
                continue
            parsed = keys.parse(key)
            if parsed is not None and (parsed.node, parsed.run) == ("trajectory", state.run):
                error = EngineError(
                    f"run {state.run}: no engine can serve {next(iter(out.values()))}, also after a restart from that "
                    "version's file. The engine does not compute what the trainer does with this model: try the other "
                    "rollout.engine, or report the model's config.json; then libra resume "
                    f"{shell_path(state.directory)}"
                )
                scheduler_internals.fail(self._scheduler, key, error, "libra-unservable")
                return

    def _missing(self, state: RunState, report: RolesMissing, gone: list[str], present: list[_Present]) -> str:
        present = [each for each in present if each.supplies & {*report.resources}]
        listed, work = ", ".join(report.resources), ", ".join(WORK[each] for each in report.resources)
        some = "too few" if report.some else "nobody"
        what = f"{some} {work} ({listed})" if report.had else f"{listed} not there yet"
        parts = [f"worker {name} has left the cluster" for name in gone]
        for ws, _, status, _, detail, _ in present:
            if status != "ready":
                name = f"worker {ws.name}" + (f" (process {ws.pid} on {ws.host})" if status in SETUP else "")
                parts.append(
                    STATUS_WORDS.get(status, "{name} is {status}").format(name=name, status=status, detail=detail)
                )
        stop = f"to stop and go on later, Ctrl-C and libra resume {shell_path(state.directory)}"
        advice = "; ".join(filter(None, (self._advice(state, report, present, bool(gone)), stop)))
        who = ", ".join(parts) or "no worker of this cluster has it"
        return f"for {report.for_s:.0f} s {what}: {who}\n  {advice}"

    def _advice(self, state: RunState, report: RolesMissing, present: list[_Present], gone: bool) -> str:
        def killed(those: list[_Present]) -> str:
            return ", ".join(f"kill -9 {each.ws.pid}{'' if each.ws.nanny else ' and start it again'}" for each in those)

        stages, is_stuck = {each.status for each in present}, report.for_s >= STUCK_S
        again_s = [each.again_s for each in present if each.again_s is not None]
        if dead := [p for p in present if p.status == "out" or (p.status == "failed" and p.again_s is None)]:
            return f"no automatic restart: fix the cause (see its log), then type {killed(dead)}"
        if again_s:
            return f"it is restarted in {min(again_s):.0f} s"
        if "quarantined" in stages:
            return "its engine is restarted from that version's file, and checked"
        if "setting_up" in stages and not gone:
            stuck = [each for each in present if each.status == "setting_up" and is_stuck]
            return "it works once its setup has ended" + (f"; to restart it, type {killed(stuck)}" if stuck else "")
        if not state.registration.local:
            options = dict.fromkeys(NEEDED[resource][1] for resource in report.resources)
            commands = ", ".join(f"dask worker {self._scheduler.address} {each}" for each in options)
            return f"type {commands}; libra doctor --scheduler {self._scheduler.address} shows what is there"
        if not gone:
            return ""
        logs = shell_path(state.directory / "logs")
        return f"it has not come back; see {logs}" if is_stuck else "it is restarted automatically"
