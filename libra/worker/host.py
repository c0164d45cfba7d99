"""LibraHost: what a run keeps alive on a worker between tasks (engine, replica, environment, trajectory states).

A WorkerPlugin, because a nanny that restarts a worker installs it again. What is built depends on the resources the
worker declares: ROLLOUT an engine, TRAIN a replica, COMMIT the zarr store.

Invariants
----------
1. An engine never generates for iteration ``k`` with weights older than version ``k - eta``, and pulls the newest
   published version before each generation; what it serves has passed its check (`libra.worker.verified_engine`).
2. A record is appended before it is applied or reported, so a lost worker costs at most the quantum in flight.
3. One generation or action of a trajectory runs at a time here, and only with the records of all before it.
4. A trajectory keeps its slot from one generation to the next only while the plugin says that nobody waits for one.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin
from numpy.typing import NDArray

from libra import keys
from libra.cluster import worker_stacks
from libra.envs import run_action
from libra.envs.scripted import turn_by_script
from libra.errors import EngineAsleep, EngineError, EnvironmentFault, FencedOff, LibraError, StoreError
from libra.keys import host_name
from libra.store.epochs import Epoch
from libra.store.trajectory_journal import Journal
from libra.types import FailureClass, Phase, Prompt, ToolCall, ToolReturn, TrajectoryId, TurnRequest
from libra.weights import WeightVersion
from libra.worker.batch_rows import RowKeeper, keeper_of
from libra.worker.checkpoint_writer import CheckpointWriter
from libra.worker.dask_internals import cheap_reschedule, heartbeat_during_setup, priority_here, still_wanted
from libra.worker.engine_declaration import Declaring
from libra.worker.engine_factory import EngineKind, make_engine, told_of
from libra.worker.failure_classes import FAULTS, failure_of
from libra.worker.gang_member import GangMember
from libra.worker.model_files import local_model
from libra.worker.replica_factory import make_replica
from libra.worker.reports import report
from libra.worker.role_member import RoleMember, open_pool
from libra.worker.run_spec import RunSpec
from libra.worker.setup import close_environment, report_setup_failure
from libra.worker.trajectory_state import TrajectoryState, action_record, failure_record, generation_record, returned
from libra.worker.verified_engine import Serving
from libra.worker.weight_sync import weights_of

if TYPE_CHECKING:
    from libra.rollout import RolloutEngine
    from libra.store.trajectories import TrajectoryStore
    from libra.train import Replica
    from libra.train.replica_group import TrainGroup
    from libra.weights.transfer import WeightServer

logger = logging.getLogger(__name__)

ONE_MODEL_AT_A_TIME = asyncio.Lock()
"""transformers builds a model under a device context of the whole process: two runs' models at once come out without data."""
KEPT_PROMPTS = 1024
"""Tokenised prompts kept in memory per engine."""
SWITCH_INTERVAL_S = 0.0005
"""How long a thread of a rollout worker may keep the interpreter while another waits for it."""
STORE_WAIT_S = 20.0
"""How long a resumed run waits for the committer of the start before to let go of the store."""
KEPT_STATES = 4096
"""Trajectory states kept in memory per worker; one that is missing is read again from the journal."""


class LibraHost(WorkerPlugin):
    """One per worker and run."""

    idempotent = False

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.name = host_name(spec.run)
        self.serving: Serving | None = None
        self.replica: Replica | None = None
        self.checkpoints: CheckpointWriter | None = None
        self.gang: GangMember | None = None
        self.roles: RoleMember | None = None
        self.replayed: list[dict[str, Any]] = []
        self.store: TrajectoryStore | None = None
        self.server: WeightServer | None = None
        self.rows: RowKeeper | None = None
        self.paused: tuple[int, str] | None = None  # step after which none is taken, and why
        self.unfit = ""  # what went wrong in `setup`

    @property
    def engine(self) -> RolloutEngine | None:
        """The engine in use, None on a worker that has none."""
        return self.serving.engine if self.serving is not None else None

    # ---------------------------------------------------------------- life

    async def setup(self, worker: Worker) -> None:
        """Build what this worker's resources ask for; an error reaches the driver where the run is just starting, else the
        scheduler says so (`libra.scheduler.unready_workers`)."""
        self.worker = worker
        with heartbeat_during_setup(worker), report_setup_failure(self):
            await self._build(worker)
        self._tell("ready")

    async def _build(self, worker: Worker) -> None:
        cheap_reschedule()
        worker_stacks.install(worker)
        self.model_dir = await asyncio.to_thread(local_model, self.spec.model_dir)
        self.environment = self.spec.make_environment()
        await self.environment.setup()
        self.epoch = Epoch(self.spec.epochs_dir, self.spec.epoch)
        self.epoch.check()
        self.journal = Journal(self.spec.journal_dir)
        self.weights, self.fetching, self.server = weights_of(worker, self.spec)
        self.rows = keeper_of(worker, self.spec)
        self.states: dict[TrajectoryId, TrajectoryState] = {}
        self.closing = False
        self.contended = False  # whether trajectories wait for rollout slots, as the plugin last said
        self._prompts: OrderedDict[str, NDArray[np.int32]] = OrderedDict()
        self._background: set[asyncio.Task[None]] = set()
        supply = worker.state.total_resources
        async with ONE_MODEL_AT_A_TIME:
            if supply.get(keys.ROLLOUT):
                kind = EngineKind.of(self.spec.config, supply)
                if supply.get(keys.HYBRID) and self.spec.config.cluster.hybrid_workers:
                    self.roles = RoleMember(self, kind)
                await self._start_engine(kind, asleep=self.roles is not None and await self.roles.came_back())
            if supply.get(keys.TRAIN):
                await self._start_training()
        if self.serving is not None:
            await self._catch_up_engine(self.serving)
        if supply.get(keys.COMMIT):
            self.store = await asyncio.to_thread(self._open_store)
        # What the first task would import, for seconds and with this event loop stopped, is imported here, while nobody waits.
        await asyncio.to_thread(importlib.import_module, "libra.graph.nodes")
        if supply.get(keys.TOOL) and self.environment.tools:
            await asyncio.to_thread(self._chat)
        if self.roles is not None:
            self.roles.announce()
        # What is loaded by now stays: torch and transformers are half a million objects that a full collection would walk
        # through (0.2 s with the interpreter stopped) again and again.
        gc.collect()
        gc.freeze()

    async def teardown(self, worker: Worker) -> None:
        """Close what was built."""
        self.closing = True
        if self.gang is not None:
            self.gang.close()
        if self.roles is not None:
            await self.roles.close()
        if self.replica is not None and self.replica.hybrids is not None:
            self.replica.hybrids.close()
        if self.serving is not None:
            await self.serving.close()
        if self.server is not None:
            await asyncio.to_thread(self.server.close)
        if self.rows is not None:
            await asyncio.to_thread(self.rows.close)
        if self.store is not None:
            self.store.close()
        if hasattr(self, "journal"):
            self.journal.close()
        await close_environment(self)

    async def _start_training(self) -> None:
        """A replica of its own, or a place in a group; one that is to be sharded is made when the group is there."""
        in_group = self.spec.config.cluster.train_workers > 1
        if not in_group or self.spec.config.trainer.layout == "ddp":
            await asyncio.to_thread(self.put_replica)
        if in_group:
            self.gang = GangMember(self)
            self.gang.announce()
        else:
            open_pool(self, gang=0)

    def put_replica(self, group: TrainGroup | None = None) -> None:
        """Make the replica, anew where there was one."""
        self.replica = make_replica(self.spec, self.model_dir, group)
        self.checkpoints = CheckpointWriter(self.replica, self.spec.checkpoints_dir, self.spec.config)

    async def _start_engine(self, kind: EngineKind, *, asleep: bool) -> None:
        """An engine, or where it is to begin ``asleep`` what is needed to wake one."""
        self.chat = self._load_chat()
        self.kind, self.declaring = kind, Declaring(self)
        self.serving = Serving(
            Path(self.spec.from_checkpoint or self.model_dir),
            build=partial(make_engine, self.spec.config, kind),
            newest=self._newest,
            tell=self._tell,
            store=self.weights,
            scratch=Path(self.worker.local_directory),
            one_model=ONE_MODEL_AT_A_TIME,
        )
        if asleep:
            self.serving.asleep = True
        else:
            await self.serving.start()
        self.worker.stream_handlers.setdefault("libra-version", self._version_announced)
        self.worker.stream_handlers.setdefault("libra-contended", self._contention_announced)
        self._tell("joined", weights=self.offered, engine=kind.told)
        if asleep:
            self._tell("asleep")
        # The engine's thread and this event loop share one lock; at 5 ms, Python's default, the loop waits for whole steps.
        sys.setswitchinterval(SWITCH_INTERVAL_S)

    async def _catch_up_engine(self, serving: Serving) -> None:
        """A worker that joins in mid-run takes the newest version; one whose engine is out says so with its first task."""
        newest = await self._newest()
        serving.announced = newest.number if newest is not None else 0
        try:
            await serving.pull()
        except EngineError as error:
            logger.error("worker %s: %s", self.worker.name, error)

    def _open_store(self) -> TrajectoryStore:
        """The store, as its one committer. That of an older epoch may need a moment to find out that it is fenced off."""
        from libra.store.trajectories import TrajectoryStore

        until_s = time.monotonic() + STORE_WAIT_S
        while True:
            try:
                return TrajectoryStore.open(self.spec.store_path, mode="a")
            except StoreError:
                if time.monotonic() > until_s or self.spec.epoch == 0:
                    raise
                time.sleep(0.2)

    # ---------------------------------------------------------------- weights

    def _version_announced(
        self,
        run: str,
        epoch: int,
        version: int,
        holders: Sequence[Sequence[Any]] = (),
        digest: str | None = None,
        **extra: Any,
    ) -> None:
        """A version can be pulled. Runs on the worker's stream, where an exception would close the worker."""
        host = self.worker.plugins.get(host_name(run))
        if isinstance(host, LibraHost) and host.spec.epoch == epoch:
            assert host.serving is not None, "only a worker with an engine says that it joined"
            host.serving.announced = max(host.serving.announced, version)
            if host.fetching is not None:
                host.fetching.announced(version, holders, digest)
            task = asyncio.ensure_future(host._pull_announced())
            host._background.add(task)
            task.add_done_callback(host._background.discard)

    def _contention_announced(self, contended: bool, **extra: Any) -> None:
        """Whether anybody waits for rollout slots. Runs on the worker's stream, for the hosts of all runs here."""
        for host in self.worker.plugins.values():
            if isinstance(host, LibraHost):
                host.contended = contended

    async def _pull_announced(self) -> None:
        try:
            if self.serving is not None:
                await self.serving.pull()
        except LibraError as error:
            logger.warning(
                "run %s: pulling an announced version failed, the next quantum tries again: %s", self.spec.run, error
            )

    async def _newest(self) -> WeightVersion | None:
        """The newest version published, where this worker can read it."""
        if self.fetching is not None:
            return await self.fetching.newest()
        return await asyncio.to_thread(self.weights.latest)

    @property
    def offered(self) -> tuple[str, int] | None:
        """Host and port at which this worker passes on weights; None where it does not."""
        return None if self.server is None else (self.server.holder.host, self.server.holder.port)

    def _tell(self, kind: str, **fields: Any) -> None:
        """Report of this worker's engine, and before it what a new one says of itself; Dask puts the address into "worker"."""
        if kind in ("joined", "awake", "served") and self.serving is not None and not self.serving.asleep:
            self.declaring.tell(anew=kind != "served")
        if kind == "served" and self.serving is not None:
            fields |= told_of(self.kind, self.serving.engine)
        report(self.worker, self.spec, kind, name=str(self.worker.name), address=self.worker.address, **fields)

    # ---------------------------------------------------------------- trajectories

    def state(self, tid: TrajectoryId, prompt: Prompt) -> TrajectoryState:
        """The trajectory's state with every record written so far."""
        state = self.states.get(tid)
        if state is None:
            rollout = self.spec.config.rollout
            state = self.states[tid] = TrajectoryState(
                tid,
                prompt,
                rollout.max_turns,
                rollout.max_context_tokens,
                rollout.ignore_eos,
                self.spec.config.trainer.resample,
            )
            while len(self.states) > KEPT_STATES:
                self.states.pop(next(iter(self.states)))
        for record in self.journal.read(str(tid), start=state.quanta):
            state.apply(record)
        return state

    async def quantum(self, key: str, tid: TrajectoryId, prompt: Prompt) -> TrajectoryState:
        """Run the next quantum of a trajectory here, write its record, report it; returns the state after it.

        Where the next one is a generation again (its tools ran inline) and nobody waits for the slot, it follows at once:
        each quantum has its record and its report, but there is nothing to decide between them.
        """
        state = self.state(tid, prompt)
        if state.phase is None:
            report(self.worker, self.spec, "ended", key=key, quanta=state.quanta, end=str(state.end))
            return state
        if state.phase is Phase.ROLLOUT and self.serving is None:
            # A worker died after its record and before its report: say where the trajectory stands, and wait for an engine.
            self._report(key, state, state.quanta, time.time(), goes_on=False)
            return state
        goes_on = True
        while goes_on:
            started_s, first = time.time(), state.quanta
            generates = state.phase is Phase.ROLLOUT
            await self._one_quantum(key, state, started_s)
            goes_on = (
                generates
                and state.phase is Phase.ROLLOUT
                and state.records[-1]["kind"] != "failure"  # another attempt may fare better elsewhere
                and not self.contended
                and not (self.roles is not None and self.roles.leaving)
                and still_wanted(self.worker, key)
            )
            self._report(key, state, first, started_s, goes_on=goes_on)
        return state

    async def _one_quantum(self, key: str, state: TrajectoryState, started_s: float) -> None:
        try:
            if state.phase is Phase.ROLLOUT:
                await self._generate(key, state)
                if state.phase is Phase.TOOL and self._inline(state.calls):
                    await self._act(state)
            else:
                await self._act(state)
        except EngineAsleep:
            report(self.worker, self.spec, "given_back", key=key)
            raise
        except FAULTS as error:
            self._commit(state, failure_record(failure_of(error), str(error)), started_s)
            self._forget(state)

    async def _generate(self, key: str, state: TrajectoryState) -> None:
        serving, rollout = self.serving, self.spec.config.rollout
        assert serving is not None, f"{state.tid}: a generation was sent to a worker without an engine"
        await serving.pull()
        started_s = time.time()
        prompt_ids = self._prompt_ids(state.prompt) if not state.context else None
        context_ids = state.context_ids if prompt_ids is None else prompt_ids
        temperature = rollout.temperature
        if state.tid.split == "eval" and self.spec.config.evaluation.temperature is not None:
            temperature = self.spec.config.evaluation.temperature
        script = turn_by_script(self.environment, state.tid, state.prompt, state.turns)
        wanted = rollout.max_new_tokens if script is None else script.new_tokens
        room = rollout.max_context_tokens - len(context_ids)
        output = await serving.generate(
            TurnRequest(
                trajectory_id=str(state.tid),
                turn=state.turns,
                context_ids=context_ids,
                max_new_tokens=max(1, min(wanted, room)),
                temperature=temperature,
                top_p=rollout.top_p,
                stop_ids=() if rollout.ignore_eos else self.chat.stop_ids,
                seed=self.spec.turn_seed(state.tid, state.turns, state.draw),
                priority=priority_here(self.worker, key),
            )
        )
        self.declaring.after_a_turn()
        text = self.chat.decode(output.token_ids)
        calls = self._parse(text) if script is None else script.calls
        self._commit(state, generation_record(state.turns, prompt_ids, output, text, calls), started_s)
        if state.phase is None:
            self._forget(state)

    def _forget(self, state: TrajectoryState) -> None:
        """Free what the engine keeps for a trajectory that goes on elsewhere, or has ended."""
        if self.serving is not None:
            self.serving.forget(str(state.tid))

    def _parse(self, text: str) -> tuple[ToolCall, ...]:
        try:
            return self.environment.parse(text)
        except Exception as error:  # the boundary to the user's environment
            raise EnvironmentFault(
                f"{self.environment.name}.parse raised {type(error).__name__}: {error}, for the text {text[:200]!r}"
            ) from error

    def _prompt_ids(self, prompt: Prompt) -> NDArray[np.int32]:
        """Token ids of a prompt; the samples of a group ask for the same ones."""
        ids = self._prompts.get(prompt.prompt_id)
        if ids is None:
            ids = self._prompts[prompt.prompt_id] = self.chat.prompt_ids(list(prompt.messages))
            if len(self._prompts) > KEPT_PROMPTS:
                self._prompts.popitem(last=False)
        return ids

    def _inline(self, calls: tuple[ToolCall, ...]) -> bool:
        """Whether every call is malformed or of a tool cheap enough to run within the generation quantum."""
        inline = {tool.name for tool in self.environment.tools if tool.inline}
        return all(call.error is not None or call.name in inline for call in calls)

    async def _act(self, state: TrajectoryState) -> None:
        started_s, turn = time.time(), state.turns - 1
        # Evaluations at two versions are the same questions, seeds and injected faults.
        name = str(state.tid if state.tid.split == "train" else state.tid._replace(iteration=0))
        if state.draw:
            name += f".{state.draw}"
        outcomes = await asyncio.gather(
            *(
                run_action(self.environment, state.prompt, call, action_id=f"{name}/{turn}/{index}")
                for index, call in enumerate(state.calls)
            ),
            return_exceptions=True,  # all have ended before the trajectory goes on, or ends
        )
        returns: list[ToolReturn] = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            returns.append(outcome)
        last = state.records[-1]["token_ids"]
        observation = self._chat().observation_ids(
            [r.content for r in returns], ended=bool(len(last)) and int(last[-1]) in self._chat().stop_ids
        )
        self._commit(state, action_record(turn, returns, observation), started_s)

    def _chat(self) -> Any:
        """The chat format, which needs the tokenizer."""
        if not hasattr(self, "chat"):
            self.chat = self._load_chat()
        return self.chat

    def _load_chat(self) -> Any:
        from libra.rollout import load_chat_format

        return load_chat_format(self.model_dir, self.environment.tool_schemas, tool_format=self.environment.tool_format)

    def _commit(self, state: TrajectoryState, record: dict[str, Any], started_s: float) -> None:
        """Append the record; only then is it true. RecordExists or FencedOff means that another was first: stop here."""
        self.epoch.check()
        if self.closing:  # what an engine that is closed says of its requests is no failure of theirs
            raise FencedOff(f"{state.tid}: worker {self.worker.name} gives the run up, and writes nothing more")
        record |= {
            "worker": str(self.worker.name),
            "start_s": started_s,
            "stop_s": time.time(),
            "epoch": self.spec.epoch,
        }
        self.journal.append(str(state.tid), state.quanta, record)
        state.apply(record)

    def _report(self, key: str, state: TrajectoryState, first: int, started_s: float, *, goes_on: bool) -> None:
        """Tell the plugin what the quantum did; ``first`` is the index of the first record it wrote.

        ``goes_on``: the next quantum of the trajectory begins in the same slot.
        """
        new = state.records[first:]
        generated = [r for r in new if r["kind"] == "generation"]
        tool, status = returned(new)
        failed = next((r for r in new if r["kind"] == "failure"), None)
        report(
            self.worker,
            self.spec,
            "quantum",
            key=key,
            quantum=state.quanta - 1,
            next=str(state.phase) if state.phase is not None else "",
            goes_on=goes_on,
            end=str(state.end) if state.end is not None else "",
            failure=failed["failure"] if failed else str(state.failure if new else FailureClass.NONE),
            detail=failed["detail"] if failed else state.detail,
            tokens=sum(len(r["token_ids"]) for r in generated),
            version=min((int(r["weight_versions"].min()) for r in generated if len(r["token_ids"])), default=-1),
            tool=tool,
            status=str(status),
            payload_tokens=sum(len(r["observation_ids"]) for r in new if r["kind"] == "action"),
            context_tokens=state.num_context_tokens,
            start_s=started_s,
            stop_s=time.time(),
        )
