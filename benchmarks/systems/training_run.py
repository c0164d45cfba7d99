"""A training run in virtual time whose trainer has GPUs: waves of gradients, changes of roles, and
GPU-seconds by cause.

`Simulator` has rollouts, gates and versions; here a step takes the GPU-seconds of its groups on the
GPUs that train, its groups come as the discipline requires, and engines may train
(`libra.policy.tail`).

Invariants
----------
1. Every group is trained on at most once, in one batch; a step closes when its batch is complete
   and all its gradients are computed.
2. A GPU generates, trains, or has one of the causes of idle time (`systems.gpu_seconds`): their
   seconds add up to GPUs x seconds.
3. Lags are within the bound, as `libra.policy.admission` (gates) and `StreamedBatches` keep it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from benchmarks.systems.disciplines import Discipline, Roles
from benchmarks.systems.gpu_seconds import Cause, GpuSeconds, PipelineResult
from benchmarks.systems.training_gpus import GroupWork, PipelineOptions, StreamedBatches, TrainingGpus
from libra.errors import ConfigError
from libra.facts import OpenWave, Turn, Turned
from libra.policy import CommittedGroup, Ordering
from libra.policy.tail import OpenStep, TurningEngine
from libra.policy.waves import GroupId, Waves
from libra.sim.simulated_trajectory import SimulatedTrajectory
from libra.sim.simulation_options import EngineSpec, SimulationOptions
from libra.sim.simulator import Simulator
from libra.sim.workload import Workload


class Pipeline(Simulator):
    """One workload under one discipline; `train` it once."""

    def __init__(
        self,
        workload: Workload,
        engines: Sequence[EngineSpec],
        ordering: Ordering,
        discipline: Discipline,
        work: Mapping[GroupId, GroupWork],
        options: PipelineOptions,
        *,
        seed: int = 0,
    ) -> None:
        options = checked_options(options, discipline)
        around = SimulationOptions(
            eta=options.eta, load_s=options.load_s, preempts=discipline.preempts,
            host=options.host if discipline.kv_moves else None, teacher_token_s=options.teacher_token_s,
        )  # fmt: skip
        super().__init__(workload, engines, ordering, seed=seed, options=around)
        self._keeps_dispatches = False
        self._discipline, self._pipeline, self._work = discipline, options, work
        self._trainer = TrainingGpus(self._core_gpus)
        self._batches = StreamedBatches(options.eta, self._groups.per_iteration, own=discipline.own_batches)
        self._lags = list[int]()
        self._waiting: list[GroupId] = []  # taken by the open batch, scored, and not trained on yet
        self._unscored = 0  # taken by the open batch, and not scored yet
        prices = self._wave_prices = self._pipeline.waves if self._discipline.streaming else None
        self._waves = None if prices is None else Waves(prices.most, prices.least_groups, prices.enough_groups)
        self._wave: OpenWave | None = None  # whose gradients are being computed
        self._arriving: set[str] = set()  # engines that train from the next wave on
        self._doing = dict.fromkeys(self._specs, Turned.ROLLOUT)
        self._turns: list[Turn] = []
        self._gpu_s, self._trained_gpu_s = GpuSeconds(), 0.0
        self._trainers_idle = Cause.NO_WORK
        self._closing = self._merges = self._look = False
        self._no_later_s = math.inf  # when a step that takes too long is given up
        beside = self._pipeline.eta > 0 and self._core_gpus == 1
        self._beside_s = self._pipeline.beside_s if beside else 0.0
        self._serial = 0  # of the next end of all gradients, as it was last computed

    def train(self) -> PipelineResult:
        self.play()
        published = tuple(self.record.iteration_s[step] for step in sorted(self.record.iteration_s))
        gave_up = self.agenda.now_s > self._no_later_s
        gpu_s = self._by_cause() if self._pipeline.causes else {}
        return PipelineResult(published, gpu_s, tuple(self._turns), tuple(self._lags), gave_up)

    def _by_cause(self) -> Mapping[Cause, float]:
        self._count()
        for engine in self.running_engines.values():
            engine.stop_clock(self.agenda.now_s)
        for name, each in self._all_counters():
            gpus = self._specs[name].tp
            self._gpu_s.move(gpus * each.again_s, Cause.GENERATING, Cause.AGAIN)
            self._gpu_s.move(gpus * each.load_s, Cause.GENERATING, Cause.UPDATE)
        return dict(self._gpu_s.total)

    @property
    def _core_gpus(self) -> int:
        return self._pipeline.core_gpus if self._discipline.core_trainers else 0

    # ---------------------------------------------------------------- the simulator's events

    def _open(self, iterations: int) -> None:
        self._carry_out(self._admission.version_published(0))
        for iteration in range(iterations):
            self._carry_out(self._admission.gate_parked(iteration))
        self._open_step(0)

    def _is_over(self, iterations: int) -> bool:
        done = len(self.record.iteration_s) == (self._pipeline.num_steps or iterations)
        return done or self.agenda.now_s > self._no_later_s

    def _dispatch(self) -> None:
        if self._look and self._discipline.roles is not Roles.SPLIT:
            self._look = False
            self._turn()  # first: engines that return share what has just begun with those that stayed
        super()._dispatch()
        if self._pipeline.causes:
            self._count()

    def _begin(self, iteration: int) -> None:
        super()._begin(iteration)
        self._look = True

    def _first_generated(self, place: GroupId, version: int) -> None:
        super()._first_generated(place, version)
        self._batches.generation_started(*place, version)

    def _end(self, one: SimulatedTrajectory) -> None:
        super()._end(one)
        self._look = True

    def _commit(self, place: GroupId) -> None:
        self._teacher.committed(place, self.agenda.now_s)
        self._feed(self._batches.group_committed(CommittedGroup(*place, self._groups.oldest[place])))

    def _step_ended(self, batch: int) -> None:
        if not self._beside_s:
            self._trained(batch)
            self._next_step(batch)
            return
        now_s = self.agenda.now_s
        self._published_s = now_s + self._beside_s
        self.agenda.at(now_s + self._pipeline.update_s, self._trained, batch)
        self._next_step(batch)

    def _next_step(self, batch: int) -> None:
        self._closing, self._merges, self._look = False, False, True
        if batch + 1 < len(self._groups.plans):
            self._open_step(batch + 1)

    def _trained(self, batch: int) -> None:
        self._look = True
        super()._trained(batch)
        options = self._pipeline
        if options.gives_up is not None and options.num_steps is not None and batch + 1 == options.gives_up[0]:
            left_out, longest_s = options.gives_up
            self._no_later_s = self.agenda.now_s + longest_s * (options.num_steps - left_out)

    # ---------------------------------------------------------------- training

    def _open_step(self, batch: int) -> None:
        if self._waves is not None and self._wave_prices is not None:
            self._waves.forget(batch - 1)
            for number in range(self._wave_prices.most):
                self._waves.parked(batch, number)
        self._feed(self._batches.version_published(batch))

    def _feed(self, groups: Sequence[GroupId]) -> None:
        for place in groups:
            at_s = self._teacher.scored_s([place], self.agenda.now_s)
            if at_s > self.agenda.now_s:
                self._unscored += 1
                self.agenda.at(at_s, self._scored, place)
            else:
                self._waiting.append(place)
        self._lags += [self._batches.batch - self._groups.oldest[place] for place in groups]
        self._train_waiting()

    def _scored(self, place: GroupId) -> None:
        self._unscored -= 1
        self._waiting.append(place)
        self._train_waiting()

    def _train_waiting(self) -> None:
        if self._waves is not None:
            self._begin_wave()
        else:
            self._train_parts()
        self._look = True
        self._expect_gradients()

    def _train_parts(self) -> None:
        if not (self._discipline.streaming or (self._batches.is_full and not self._unscored)):
            return
        for place in self._waiting:
            self._trainer.add(self.agenda.now_s, self._work[place])
        self._waiting.clear()

    def _begin_wave(self) -> None:
        waves, prices, now_s = self._waves, self._wave_prices, self.agenda.now_s
        assert waves is not None and prices is not None
        wave = waves.next(self._batches.batch, self._groups.per_iteration, self._waiting)
        if wave is None or not wave.members:
            return
        self._wave = wave
        self._waiting = [place for place in self._waiting if place not in wave.members]
        work, trainer = [self._work[place] for place in wave.members], self._trainer
        besides_s = prices.shared_s if trainer.gpus > self._core_gpus else prices.alone_s
        gpu_s = sum(each.gpu_s for each in work) + besides_s * trainer.gpus
        trainer.add(now_s, GroupWork(gpu_s, max(each.longest_s for each in work) + besides_s))

    def _expect_gradients(self) -> None:
        self._serial += 1
        at_s = self._trainer.over_s()
        full = self._batches.is_full and not self._unscored
        awaited = full if self._waves is None else self._wave is not None
        if awaited and not self._closing and at_s is not None:
            self.agenda.at(max(at_s, self.agenda.now_s), self._computed, self._serial)

    def _computed(self, serial: int) -> None:
        if serial != self._serial:
            return
        self._trainer.advance(self.agenda.now_s)
        self._trainer.backlog_gpu_s = 0.0
        if self._waves is not None and self._wave is not None:
            self._waves.trained(self._batches.batch, self._wave.wave)
            self._wave, self._look = None, True
            for name in sorted(self._arriving):
                self._trainer.change(self.agenda.now_s, self._specs[name].tp)
            self._arriving.clear()
            if len(self._waves.taken(self._batches.batch)) < self._groups.per_iteration:
                self._begin_wave()
                self._expect_gradients()
                return
        self._closing = True
        seconds = self._pipeline.close_s + (self._pipeline.merge_s if self._merges else 0.0)
        begins_s = self.agenda.now_s
        if self._beside_s:  # the weights change once the version before is published
            begins_s = max(begins_s, self._published_s)
        else:
            seconds += self._pipeline.update_s
        self.agenda.at(begins_s + seconds, self._step_ended, self._batches.batch)

    # ---------------------------------------------------------------- roles

    def _turn(self) -> None:
        trainer, rule = self._trainer, self._pipeline.rule
        trainer.advance(self.agenda.now_s)
        states = [
            TurningEngine(name, spec.tp, self._doing[name], self._dispatcher.residents(name))
            for name, spec in self._specs.items()
        ]
        step = None
        if not self._closing:
            waits = self._pipeline.eta == 0
            later = [] if self._waves is None else self._waiting
            backlog_gpu_s = trainer.backlog_gpu_s + sum(self._work[place].gpu_s for place in later)
            step = OpenStep(backlog_gpu_s, self._core_gpus, self._batches.is_full, waits)
        if self._discipline.roles is Roles.WHOLE_POOL:
            turns = whole_pool(states, step)
        else:
            turns = rule.turns(states, len(self._running), step)
        if not turns:
            return
        for turn in turns:
            self._change(turn)
        self._spread()
        self._expect_gradients()

    def _change(self, turn: Turn) -> None:
        name, rule, now_s = turn.worker, self._pipeline.rule, self.agenda.now_s
        gpus = self._specs[name].tp
        self._turns.append(turn)
        if turn.to is Turned.TRAINING:
            self._doing[name] = Turned.TO_TRAINING
            self.hand_over(name)
            seconds = rule.to_training_s + self._pipeline.drain_s
        else:
            self._doing[name] = Turned.TO_ROLLOUT
            if name in self._arriving:
                self._arriving.remove(name)
            else:
                self._trainer.change(now_s, -gpus)
            seconds = rule.to_rollout_s
        self.agenda.at(now_s + seconds, self._changed, name, turn.to)

    def _changed(self, name: str, to: Turned) -> None:
        self._doing[name], self._look = to, True
        if to is Turned.TRAINING:
            self._merges = True
            if self._wave is not None and self._trainer.gpus:
                self._arriving.add(name)  # its share of the wave that is being trained is with others
            else:
                self._trainer.change(self.agenda.now_s, self._specs[name].tp)
                self._expect_gradients()
        else:
            self._join(self._specs[name])
            self._spread()

    def _spread(self) -> None:
        """While engines return, others use fewer slots: trajectories wait for them."""
        returning = [name for name, doing in self._doing.items() if doing is Turned.TO_ROLLOUT]
        generating = [self._specs[name] for name, doing in self._doing.items() if doing is Turned.ROLLOUT]
        gpus = sum(self._specs[name].tp for name in returning) + sum(spec.tp for spec in generating)
        fair = len(self._running) / gpus if gpus else 0.0
        for spec in generating:
            slots = min(spec.slots, max(1, round(fair * spec.tp + 0.5))) if returning else spec.slots
            self.notify(replace(spec.joined(self._typical_context), rollout_slots=slots))

    # ---------------------------------------------------------------- where GPU-seconds go

    def _count(self) -> None:
        trainer, ledger, now_s = self._trainer, self._gpu_s, self.agenda.now_s
        ledger.until(now_s)
        trained = trainer.busy_gpu_s_at(now_s)
        ledger.move(trained - self._trained_gpu_s, self._trainers_idle, Cause.TRAINING)
        self._trained_gpu_s = trained
        self._trainers_idle = Cause.UPDATE if self._closing else Cause.NO_WORK
        gpus = Counter({self._trainers_idle: trainer.gpus})
        for name, doing in self._doing.items():
            if name in self._arriving:
                gpus[Cause.NO_WORK] += self._specs[name].tp
            elif doing is not Turned.TRAINING:
                gpus[self._engine_does(name, doing)] += self._specs[name].tp
        ledger.holds(gpus)

    def _engine_does(self, name: str, doing: Turned) -> Cause:
        if doing is not Turned.ROLLOUT:
            return Cause.ROLES
        engine = self.running_engines[name]
        if engine.is_running:
            return Cause.GENERATING
        if engine.is_fetching:
            return Cause.AGAIN
        if self._dispatcher.residents(name):
            return Cause.TOOLS
        if self._running:
            return Cause.NO_WORK
        return Cause.UPDATE if self._closing else Cause.STEP


def checked_options(options: PipelineOptions, discipline: Discipline) -> PipelineOptions:
    """The options with a discipline's seconds; ConfigError if they are not enough for it."""
    if options.eta not in discipline.etas:
        raise ConfigError(f"eta: got {options.eta}; this discipline is defined for {discipline.etas}")
    if discipline.kv_moves and options.host is None:
        raise ConfigError("host: got None; this discipline keeps KV in host memory, give it a HostPool")
    if not (options.core_gpus and discipline.core_trainers) and discipline.roles is Roles.SPLIT:
        raise ConfigError("core_gpus: got 0 where no engine trains; type at least 1")
    if discipline.changes_s is not None:
        to_training_s, to_rollout_s = discipline.changes_s
        rule = dataclasses.replace(options.rule, to_training_s=to_training_s, to_rollout_s=to_rollout_s)
        options = dataclasses.replace(options, rule=rule)
    return options


def whole_pool(engines: Sequence[TurningEngine], step: OpenStep | None) -> tuple[Turn, ...]:
    """All engines train when the batch is complete, and return when its weights are published."""
    if step is None:
        return ()
    if step.is_full:
        rolling = [engine for engine in engines if engine.doing is Turned.ROLLOUT]
        return tuple(Turn(engine.name, Turned.TRAINING, "the batch is complete") for engine in rolling)
    back = [engine for engine in engines if engine.doing is Turned.TRAINING]
    return tuple(Turn(engine.name, Turned.ROLLOUT, "new weights are published") for engine in back)
