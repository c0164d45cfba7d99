"""Batches that are filled as groups come: the bound, every group once, never a dead end, under any schedule."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.systems.streamed_batches import StreamedBatches
from libra.facts import OpenGate
from libra.policy import Admission, CommittedGroup


def train(eta, groups, steps, own, seed):
    """A whole training under a random schedule: the groups of each batch, with their lags."""
    rng, admission, batches = random.Random(seed), Admission(eta, groups), StreamedBatches(eta, groups, own=own)
    waiting = []
    running = {}
    started = {}
    taken = {step: [] for step in range(steps)}

    def take(places):
        taken[batches.batch].extend((place, batches.batch - started[place]) for place in places)

    def open_gates(commands):
        for command in commands:
            assert isinstance(command, OpenGate)
            waiting.extend((command.iteration, group) for group in range(groups))

    def publish(version):
        open_gates(admission.version_published(version))
        take(batches.version_published(version))

    publish(0)
    for iteration in range(steps + eta + 1):
        open_gates(admission.gate_parked(iteration))
    while True:
        if batches.is_full:
            if batches.batch + 1 == steps:
                return taken
            if rng.random() < 0.3:
                publish(batches.batch + 1)
                continue
        moves = ["start"] * bool(waiting) + ["finish"] * bool(running)
        assert moves or batches.is_full, f"batch {batches.batch} can never be full"
        if not moves:
            publish(batches.batch + 1)
        elif rng.choice(moves) == "start":
            place = waiting.pop(rng.randrange(len(waiting)))
            running[place] = started[place] = batches.batch
            batches.generation_started(*place, batches.batch)
        else:
            place = rng.choice(list(running))
            take(batches.group_committed(CommittedGroup(*place, running.pop(place))))


@given(
    eta=st.integers(0, 4), groups=st.integers(1, 5), steps=st.integers(1, 8), own=st.booleans(),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_any_schedule_fills_every_batch_within_the_bound(eta, groups, steps, own, seed):
    taken = train(eta, groups, steps, own, seed)
    assert all(len(members) == groups for members in taken.values())
    assert set(Counter(place for members in taken.values() for place, _ in members).values()) == {1}
    assert all(0 <= lag <= eta for members in taken.values() for _, lag in members)
    if own or not eta:
        assert all(place[0] == batch for batch, members in taken.items() for place, _ in members)
