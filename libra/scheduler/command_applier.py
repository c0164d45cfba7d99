"""The command applier: the only place where commands of policy objects become priorities, restrictions and released tasks.

Invariants
----------
1. Only this module writes ``ts.priority`` and releases parked tasks; every write has a line in its run's event log.
2. A task that runs keeps its priority until it parks; its worker learns the new rank, by which it keeps its slot or not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from libra import keys
from libra.facts import (
    Command,
    LoadVersion,
    OpenBatch,
    OpenGate,
    OpenWave,
    Prefer,
    SetPriority,
    TakeSteps,
    Turn,
    Turned,
    TurnRefused,
    Vacate,
    sentence,
)
from libra.policy import Dispatcher
from libra.policy.role_changes import Role
from libra.scheduler import dask_internals
from libra.scheduler.announcements import announce_rank, announce_version
from libra.scheduler.run_state import RunState

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

logger = logging.getLogger("libra.scheduler")
task_logger = logging.getLogger("libra.scheduler.tasks")


class Applier:
    """Carries out commands for all runs on a scheduler; calls ``kick`` when a dispatch may be due."""

    def __init__(self, scheduler: Scheduler, dispatcher: Dispatcher, kick: Callable[[], None]) -> None:
        self._scheduler, self._dispatcher, self._kick = scheduler, dispatcher, kick
        self.set_roles: Callable[..., dict[str, Any]] | None = None
        """`WorkerRoles.set_roles`, once there is one."""

    def apply(self, state: RunState, commands: tuple[Command, ...]) -> None:
        """Log and carry out. Turns follow, if what happened calls for any."""
        commands = (*commands, *turns) if (turns := state.tail.look()) else commands
        if not commands:
            return
        tasks, kicks, emit = self._scheduler.tasks, False, state.log.emit
        debug = task_logger.isEnabledFor(logging.DEBUG)
        for command in commands:
            emit(command)
            if debug:
                task_logger.debug("run %s: %s", state.run, sentence(command))
            if type(command) is SetPriority:  # by far the most
                ts = tasks.get(command.key)
                if ts is not None:
                    if ts.processing_on is not None:
                        announce_rank(self._scheduler, ts.processing_on.address, command)
                        continue
                    dask_internals.set_priority(ts, command.priority)
                    kicks = kicks or ts.state == "no-worker"
                continue
            kicks = kicks or isinstance(command, Prefer | LoadVersion | Vacate)
            if type(command) is not Prefer:
                self._carry_out(state, command)
        if kicks:
            self._kick()
        self._dispatcher.apply(commands)

    def _carry_out(self, state: RunState, command: Command) -> None:
        if isinstance(command, OpenGate | OpenBatch | TakeSteps | LoadVersion | Vacate):
            logger.info("run %s: %s", state.run, sentence(command))
        match command:
            case OpenGate(iteration=iteration):
                self.open(state, state.parked.gates.pop(iteration), keys.GRADE)
            case OpenBatch(batch=batch):
                self.open(state, state.parked.batches.pop(batch), keys.COMMIT)
            case OpenWave(batch=batch, wave=wave):
                self.open(state, state.parked.waves.pop((batch, wave)), keys.GRADE)
            case LoadVersion(worker=worker, version=version):
                announce_version(self._scheduler, state, version, only=worker)
            case Turn():
                self._scheduler.loop.add_callback(self._turn, state, command)

    def _turn(self, state: RunState, turn: Turn) -> None:
        """Ask for the change of roles of a turn, outside of the current transition; it may be refused."""
        assert self.set_roles is not None
        role = Role.TRAIN if turn.to is Turned.TRAINING else Role.ROLLOUT
        why = f"the engine turns to {turn.to}: {turn.reason}"
        answer = self.set_roles(state.run, state.epoch, {turn.worker: {"role": str(role)}}, why)
        if "error" in answer:
            refused = TurnRefused(turn.worker, answer["error"])
            state.log.emit(refused)
            state.tail.handle(refused)
            self.apply(state, ())

    def open(self, state: RunState, key: str, resource: str) -> None:
        """Release a gate or a batch, outside of the current transition."""
        task_logger.debug("%s: %s opens", state.run, key)
        release = dask_internals.Release(key, {resource: 1}, None)
        self._scheduler.loop.add_callback(dask_internals.release, self._scheduler, [release], f"libra-open-{key}")

    def release(self, releases: Iterable[dask_internals.Release], stimulus_id: str) -> None:
        """Send trajectories to the workers chosen for them."""
        dask_internals.release(self._scheduler, releases, stimulus_id)
