"""Turns commands of policy objects into priorities, restrictions, released tasks and messages.

Messages use the stream that also carries tasks, and go only to workers whose host has reported: an
unknown message would disconnect a worker without a host.

Invariants
----------
1. Only this module writes ``ts.priority`` and releases parked tasks, each with a line in the log.
2. A running task keeps its priority until it parks; its worker gets the new rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from libra import facts, keys
from libra.policy import Dispatcher, Move
from libra.policy.role_changes import Role
from libra.scheduler import scheduler_internals
from libra.scheduler.run_state import RunState
from libra.scheduler.scheduler_internals import tell_worker

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler


logger = logging.getLogger("libra.scheduler")
task_logger = logging.getLogger("libra.scheduler.tasks")


class Applier:
    def __init__(self, scheduler: Scheduler, dispatcher: Dispatcher, kick: Callable[[], None]) -> None:
        self._scheduler, self._dispatcher, self._kick = scheduler, dispatcher, kick
        self.set_roles: Callable[..., dict[str, Any]] | None = None

    def tell(self, state: RunState, fact: facts.Fact) -> None:
        """Log a fact, pass it to the run's policy objects, and carry out their commands."""
        state.log.emit(fact)
        self.apply(state, state.tell(fact))

    def apply(self, state: RunState, commands: tuple[facts.Command, ...] | None) -> None:
        if not commands:
            return
        tasks, kicks, emit = self._scheduler.tasks, False, state.log.emit
        debug = task_logger.isEnabledFor(logging.DEBUG)
        for command in commands:
            emit(command)
            if debug:
                task_logger.debug("run %s: %s", state.run, facts.sentence(command))
            if type(command) is facts.SetPriority:  # by far the most
                ts = tasks.get(command.key)
                if ts is not None:
                    if ts.processing_on is not None:
                        message = {"op": "libra-rank", "key": command.key, "rank": command.priority}
                        tell_worker(self._scheduler, ts.processing_on.address, message)
                        continue
                    scheduler_internals.set_priority(ts, command.priority)
                    kicks = kicks or ts.state == "no-worker"
                continue
            kicks = kicks or isinstance(command, facts.Prefer | facts.LoadVersion | facts.Vacate)
            if type(command) is not facts.Prefer:
                self._carry_out(state, command)
        if kicks:
            self._kick()
        self._dispatcher.apply(commands)

    def _carry_out(self, state: RunState, command: facts.Command) -> None:
        if isinstance(command, facts.OpenGate | facts.OpenBatch | facts.TakeSteps | facts.LoadVersion | facts.Vacate):
            logger.info("run %s: %s", state.run, facts.sentence(command))
        match command:
            case facts.OpenGate(iteration=iteration):
                self.open(state, state.parked.gates.pop(iteration), keys.GRADE)
            case facts.OpenBatch(batch=batch):
                self.open(state, state.parked.batches.pop(batch), keys.COMMIT)
            case facts.OpenWave(batch=batch, wave=wave):
                self.open(state, state.parked.waves.pop((batch, wave)), keys.GRADE)
            case facts.LoadVersion(worker=worker, version=version):
                announce_version(self._scheduler, state, version, only=worker)
            case facts.Turn():
                self._scheduler.loop.add_callback(self._turn, state, command)

    def _turn(self, state: RunState, turn: facts.Turn) -> None:
        assert self.set_roles is not None
        role = Role.TRAIN if turn.to is facts.Turned.TRAINING else Role.ROLLOUT
        why = f"the engine turns to {turn.to}: {turn.reason}"
        answer = self.set_roles(state.run, state.epoch, {turn.worker: {"role": str(role)}}, why)
        if "error" in answer:
            self.tell(state, facts.TurnRefused(turn.worker, answer["error"]))

    def open(self, state: RunState, key: str, resource: str) -> None:
        """Release a gate or a batch, outside of the current transition."""
        task_logger.debug("%s: %s opens", state.run, key)
        release = scheduler_internals.Release(key, {resource: 1}, None)
        self._scheduler.loop.add_callback(scheduler_internals.release, self._scheduler, [release], f"libra-open-{key}")


def announce_version(scheduler: Scheduler, state: RunState, version: int, only: str | None = None) -> None:
    """Announce a version to every rollout worker, or to ``only`` for its running requests."""
    message = {"op": "libra-version", "run": state.run, "epoch": state.epoch, "version": version}
    message |= {"digest": state.workers.holders.digest(version)}
    for worker, address in list(state.workers.engines.items()):
        if only not in (None, worker):
            continue
        if address in scheduler.workers:
            scheduler.worker_send(address, message | {"holders": state.workers.holders.nearest(version, address)})
        else:
            del state.workers.engines[worker]
            state.workers.served.pop(worker, None)


def announce_move(scheduler: Scheduler, state: RunState, worker: str, key: str, move: Move) -> None:
    """Announce to ``worker``, if it exchanges KV, that task ``key`` and its KV move there."""
    if worker not in state.workers.kv:
        return
    present = state.workers.engines.get(move.home) in scheduler.workers
    home = state.workers.kv.get(move.home) if move.sends and present else None
    expected = {"prefill_s": round(move.prefill_s, 9), "transfer_s": round(move.transfer_s or 0.0, 9)}
    tell_worker(scheduler, state.workers.engines.get(worker, ""), {
        "op": "libra-kv", "run": state.run, "epoch": state.epoch, "key": key, "home": home,
        "move": {"home": move.home, "worker": worker, "tokens": move.tokens, "sent": move.sends, **expected},
    })  # fmt: skip


def newest_version(state: RunState, worker: str) -> dict[str, Any]:
    """The newest version and where ``worker`` should fetch it; version -1 if none is published."""
    version, holders = state.admission.version, state.workers.holders
    return {"version": version, "digest": holders.digest(version), "holders": holders.nearest(version, worker)}
