"""vLLM's scheduler with one addition: while it is paused, only probes run.

vLLM's engine process imports it (``scheduler_cls``). The version check's probes run between the
loading of weights and the first token drawn from them.

1. While paused, a step schedules requests of priority `PROBE` only; every other request keeps its
   place, its KV and its state.
2. When not paused, it behaves as vLLM's scheduler.
3. The engine process does not outlive the process that started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler

from libra.rollout.vllm.engine_args import PARENT, PROBE

_PR_SET_PDEATHSIG = 1


class _Probing:
    running: list[Any]
    waiting: Any
    policy: Any
    _pause_state: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _die_with_parent()

    def get_num_unfinished_requests(self) -> int:
        """The requests that keep the engine stepping: only the probes while paused."""
        if self._pause_state is PauseState.PAUSED_ALL:
            return sum(request.priority == PROBE for request in (*self.running, *self.waiting))
        return super().get_num_unfinished_requests()  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One step; see the invariants."""
        if self._pause_state is not PauseState.PAUSED_ALL or not self.get_num_unfinished_requests():
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        held, held_waiting = [r for r in self.running if r.priority != PROBE], self.waiting
        probes = create_request_queue(self.policy)
        for request in [r for r in held_waiting if r.priority == PROBE]:
            held_waiting.remove_request(request)
            probes.add_request(request)
        self.running = [r for r in self.running if r.priority == PROBE]
        self.waiting, self._pause_state = probes, PauseState.UNPAUSED
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._pause_state = PauseState.PAUSED_ALL
            for request in list(self.waiting):
                held_waiting.add_request(request)
            self.waiting, self.running = held_waiting, held + self.running


class ProbeScheduler(_Probing, Scheduler):
    """For engines that schedule between steps: on a CPU, and with drafts."""


class AsyncProbeScheduler(_Probing, AsyncScheduler):
    """For engines that schedule a step while the previous step runs, as on a GPU."""


def _die_with_parent() -> None:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    except (OSError, AttributeError):
        return
    # The kernel sends no signal for a parent that died before this call, e.g. while this process was loading the model.
    if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):
        os.kill(os.getpid(), signal.SIGKILL)
