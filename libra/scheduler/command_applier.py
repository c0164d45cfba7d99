"""The command applier: the only place where commands of policy objects become priorities, restrictions and released tasks.

Invariants
----------
1. Only this module writes ``ts.priority`` and releases parked tasks; every write has a line in its run's event log.
2. A task that is not waiting keeps its priority; it gets a new one when it parks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from libra import events, keys
from libra.policy import (
    Command,
    Dispatcher,
    LoadVersion,
    OpenBatch,
    OpenGate,
    OpenWave,
    Prefer,
    SetPriority,
    TakeSteps,
    Turn,
    Vacate,
)
from libra.policy.role_messages import Role
from libra.policy.tail import TurnRefused
from libra.policy.turning import Turned
from libra.scheduler import dask_internals
from libra.scheduler.announcements import announce_version
from libra.scheduler.run_state import RunState

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

task_logger = logging.getLogger("libra.scheduler.tasks")


class Applier:
    """Carries out commands for all runs on a scheduler; calls ``kick`` when a dispatch may be due."""

    def __init__(self, scheduler: Scheduler, dispatcher: Dispatcher, kick: Callable[[], None]) -> None:
        self._scheduler, self._dispatcher, self._kick = scheduler, dispatcher, kick

    def apply(self, state: RunState, commands: tuple[Command, ...], on_the_line: Command | None = None) -> None:
        """Carry out and log; every command gets a line, except ``on_the_line``, which is on the line of its event
        already. Turns follow, if what happened calls for any."""
        commands = (*commands, *turns) if (turns := state.tail.look()) else commands
        if not commands:
            return
        tasks, kicks, debug = self._scheduler.tasks, False, task_logger.isEnabledFor(logging.DEBUG)
        for command in commands:
            if type(command) is SetPriority:  # by far the most
                key, priority = command.key, command.priority
                if command is not on_the_line:
                    state.log.emit(events.PrioritySet, key, priority, command.reason)
                ts = tasks.get(key)
                if ts is not None:
                    if debug:
                        task_logger.debug("%s: %s: priority %s", command.reason, key, priority)
                    dask_internals.set_priority(ts, priority)
                    kicks = kicks or ts.state == "no-worker"
                continue
            match command:
                case Prefer():
                    state.log.emit(
                        events.BucketsPreferred,
                        command.key,
                        command.buckets,
                        command.reason,
                        command.left_tokens,
                        command.final_tokens,
                        command.begins_tp,
                    )
                    kicks = True
                case OpenGate(iteration=iteration, reason=reason):
                    state.log.emit(events.GateOpened, iteration=iteration, reason=reason)
                    logging.getLogger("libra.scheduler").info(
                        "%s: iteration %d of %s begins", reason, iteration, state.run
                    )
                    self.open(state, state.parked.gates.pop(iteration), keys.GRADE)
                case OpenBatch(batch=batch, members=members, reason=reason):
                    state.log.emit(events.BatchOpened, batch=batch, members=members, reason=reason)
                    logging.getLogger("libra.scheduler").info("%s: batch %d of %s opens", reason, batch, state.run)
                    self.open(state, state.parked.batches.pop(batch), keys.COMMIT)
                case OpenWave(batch=batch, wave=wave, members=members, reason=reason):
                    state.log.emit(events.WaveOpened, batch=batch, wave=wave, members=members, reason=reason)
                    task_logger.debug("%s: wave %d of batch %d of %s opens", reason, wave, batch, state.run)
                    self.open(state, state.parked.waves.pop((batch, wave)), keys.GRADE)
                case TakeSteps() | LoadVersion() | Turn() | Vacate():
                    self._change(state, command)
                    kicks = kicks or isinstance(command, LoadVersion | Vacate)
        if kicks:
            self._kick()
        self._dispatcher.apply(commands)

    def _change(self, state: RunState, command: TakeSteps | LoadVersion | Turn | Vacate) -> None:
        """How steps are taken, which weights an engine serves, or what it does."""
        match command:
            case TakeSteps(way=way, reason=reason):
                state.log.emit(events.StepsChosen, way=way, reason=reason)
                logging.getLogger("libra.scheduler").info("%s: %s takes its steps by %s", reason, state.run, way)
            case Vacate(worker=worker, keys=moved, reason=reason):
                state.log.emit(events.EngineVacated, worker=worker, keys=moved, reason=reason)
                task_logger.info("%s: %d trajectories leave %s", reason, len(moved), worker)
            case LoadVersion(worker=worker, version=version, reason=reason):
                state.log.emit(events.VersionOrdered, worker=worker, version=version, reason=reason)
                task_logger.info("%s: %s takes version %d of %s", reason, worker, version, state.run)
                announce_version(self._scheduler, state, version, only=worker)
            case Turn(worker=worker, to=to, reason=reason):
                state.log.emit(events.EngineTurned, worker=worker, to=str(to), reason=reason)
                self._scheduler.loop.add_callback(self._turn, state, command)

    def _turn(self, state: RunState, turn: Turn) -> None:
        """Ask for the change of roles of a turn, outside of the current transition; it may be refused."""
        roles: Any = self._scheduler.plugins.get("libra-roles")
        role = Role.TRAIN if turn.to is Turned.TRAINING else Role.ROLLOUT
        why = f"the engine turns to {turn.to}: {turn.reason}"
        answer = roles.set_roles(state.run, state.epoch, {turn.worker: {"role": str(role)}}, why)
        if "error" in answer:
            state.log.emit(events.TurnRefused, worker=turn.worker, detail=answer["error"])
            state.tail.handle(TurnRefused(turn.worker))
            self.apply(state, ())

    def open(self, state: RunState, key: str, resource: str) -> None:
        """Release a gate or a batch, outside of the current transition."""
        task_logger.debug("%s: %s opens", state.run, key)
        release = dask_internals.Release(key, {resource: 1}, None)
        self._scheduler.loop.add_callback(dask_internals.release, self._scheduler, [release], f"libra-open-{key}")

    def release(self, releases: Iterable[dask_internals.Release], stimulus_id: str) -> None:
        """Send trajectories to the workers chosen for them."""
        dask_internals.release(self._scheduler, releases, stimulus_id)
