"""Waves of streamed steps under any schedule: every group in one wave of its own batch, in time, and never a dead end."""

from __future__ import annotations

import json
import random
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from libra.policy import Admission, CommittedGroup, OpenBatch, OpenGate, OpenWave, Waves

Group = tuple[int, int]


class Run:
    """A run of streamed steps under a random schedule, and what its trainer was given."""

    def __init__(self, eta: int, groups: int, most: int, least: int, enough: int = 0) -> None:
        self.eta, self.groups, self.most, self.least, self.enough = eta, groups, most, least, enough
        self.admission = Admission(eta, groups, Waves(most, least, enough))
        self.version = -1
        self.waiting: list[Group] = []
        self.running: dict[Group, int] = {}
        self.committed: dict[Group, int] = {}
        self.waves: dict[int, list[tuple[Group, ...]]] = defaultdict(list)
        self.batches: dict[int, tuple[Group, ...]] = {}
        self.untrained: list[tuple[int, int]] = []
        self.submitted = 0

    def told(self, commands: tuple[object, ...]) -> None:
        for command in commands:
            match command:
                case OpenGate(iteration=iteration):
                    assert iteration - self.eta <= self.version
                    self.waiting += [(iteration, g) for g in range(self.groups) if (iteration, g) not in self.committed]
                case OpenWave(batch=batch, wave=wave, members=members):
                    assert batch == self.version and wave == len(self.waves[batch])
                    assert all(group in self.committed for group in members)
                    if members:
                        assert not self.untrained, "the trainer is busy"
                        self.untrained.append((batch, wave))
                    self.waves[batch].append(members)
                case OpenBatch(batch=batch, members=members):
                    assert members == tuple(group for wave in self.waves[batch] for group in wave)
                    self.batches[batch] = members

    def submit(self) -> None:
        k, self.submitted = self.submitted, self.submitted + 1
        for wave in range(self.most):
            self.told(self.admission.wave_parked(k, wave))
        self.told(self.admission.gate_parked(k))

    def commit(self, group: Group) -> None:
        self.committed[group] = oldest = self.running.pop(group)
        self.told(self.admission.group_committed(CommittedGroup(*group, oldest)))

    def publish(self) -> None:
        self.version += 1
        self.told(self.admission.version_published(self.version))

    def resumed(self) -> None:
        """Another scheduler goes on from what is on the disk; the trainer has lost its gradients."""
        open_waves = {k: [w for w in waves if w] for k, waves in self.waves.items() if k not in self.batches}
        taken = Waves(self.most, self.least, self.enough)
        taken.take_over({k: waves for k, waves in open_waves.items() if waves})
        self.admission = Admission.resumed(
            self.eta,
            self.groups,
            version=-1,
            opened=self.batches,
            committed=(),
            started=dict(self.running),
            waves=taken,
        )
        self.waiting += self.running
        self.running.clear()
        self.untrained = []
        self.waves = defaultdict(list, {k: self.waves[k] for k in self.batches})
        version, self.submitted = self.version, len(self.batches)
        self.told(self.admission.version_published(version))
        before = {k: list(waves) for k, waves in open_waves.items()}
        repeated: dict[int, list[tuple[Group, ...]]] = defaultdict(list)
        k, self.submitted = self.submitted, self.submitted + 1
        for wave in range(self.most):
            for command in self.admission.wave_parked(k, wave):
                assert isinstance(command, OpenWave)
                repeated[command.batch].append(command.members)
        assert {k: [w for w in waves if w] for k, waves in repeated.items()} == {k: w for k, w in before.items() if w}
        self.waves |= repeated
        self.untrained += [(k, j) for k, waves in repeated.items() for j, wave in enumerate(waves) if wave]
        for group, oldest in self.committed.items():
            self.told(self.admission.group_committed(CommittedGroup(*group, oldest)))
        self.waiting = [group for group in self.waiting if group[0] > k]
        self.told(self.admission.gate_parked(k))


@given(st.integers(0, 2), st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(0, 10**6))
def test_every_group_is_in_one_wave_of_its_own_batch(eta: int, groups: int, most: int, least: int, seed: int) -> None:
    rng, iterations = random.Random(seed), 5
    run = Run(eta, groups, most, least, rng.randrange(4))
    run.publish()
    while run.version < iterations:
        k = run.version
        moves = ["start"] * bool(run.waiting) + ["commit"] * bool(run.running) + ["train"] * bool(run.untrained)
        if run.submitted < iterations and run.submitted <= k + eta + 1:
            moves.append("submit")
        if k in run.waves and sum(map(len, run.waves[k])) == groups and len(run.waves[k]) == most:
            moves.append("close" if not run.untrained else "train")
        assert moves, f"dead end at version {k}"
        match rng.choice(moves):
            case "submit":
                run.submit()
            case "start":
                group = run.waiting.pop(rng.randrange(len(run.waiting)))
                run.running[group] = k
                run.admission.generation_started(*group, k)
            case "commit":
                run.commit(rng.choice(list(run.running)))
            case "train":
                run.told(run.admission.wave_trained(*run.untrained.pop(0)))
            case "close":
                run.told(run.admission.batch_parked(k))
                assert sorted(run.batches[k]) == [(k, g) for g in range(groups)]
                assert all(k - run.committed[group] <= eta for group in run.batches[k])
                run.publish()
        snapshot = json.loads(json.dumps(run.admission.snapshot()))
        run.admission = Admission(9, 9)
        run.admission.restore(snapshot)
        assert json.loads(json.dumps(run.admission.snapshot())) == snapshot
    assert all(waves == sorted(waves, key=lambda wave: not wave) for waves in run.waves.values()), "left over: the last"


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**6))
def test_a_resumed_run_opens_the_same_waves_again(groups: int, most: int, seed: int) -> None:
    rng = random.Random(seed)
    run, resumes = Run(0, groups, most, 1), 2
    run.publish()
    run.submit()
    while len(run.batches) < 3:
        k = run.version
        if resumes and run.committed and rng.random() < 0.1:
            resumes -= 1
            run.resumed()
            continue
        if run.untrained and rng.random() < 0.5:
            run.told(run.admission.wave_trained(*run.untrained.pop(0)))
        elif run.running and rng.random() < 0.6:
            run.commit(rng.choice(list(run.running)))
        elif run.waiting:
            run.running[run.waiting.pop(0)] = k
        elif not run.untrained and sum(map(len, run.waves[k])) == groups:
            run.told(run.admission.batch_parked(k))
            run.publish()
            run.submit()
        else:
            assert run.running or run.untrained, "dead end"
    assert all(sorted(run.batches[k]) == [(k, g) for g in range(groups)] for k in range(3))


def test_a_wave_takes_all_that_is_complete_and_the_last_is_small() -> None:
    """Eight groups in four waves at most: two of them, then what came meanwhile, then one by one."""
    waves, wave = Waves(4), 0
    for number in range(4):
        assert waves.parked(0, number) is None
    sizes = []
    for complete in ((0,), (0, 1), (2, 3, 4, 5), (6,), (7,)):
        opened = waves.next(0, 8, [(0, g) for g in complete])
        sizes.append(0 if opened is None else len(opened.members))
        if opened is not None:
            assert waves.next(0, 8, [(0, 7)]) is None, "the trainer is busy"
            waves.trained(0, wave)
            wave += 1
    assert sizes == [0, 2, 4, 1, 1]


def test_waves_that_are_left_over_open_at_once_without_members() -> None:
    waves = Waves(3)
    for number in range(3):
        assert waves.parked(0, number) is None
    assert waves.next(0, 4, [(0, g) for g in range(4)]) == OpenWave(
        0, 0, ((0, 0), (0, 1), (0, 2), (0, 3)), "4 groups complete and the trainer free, 0 still to come"
    )
    for number in (1, 2):
        assert waves.next(0, 4, []) == OpenWave(0, number, (), "all groups are in the waves before")
    assert waves.next(0, 4, []) is None
    assert waves.parked(0, 0) == OpenWave(0, 0, tuple((0, g) for g in range(4)), "opened before; same members")
