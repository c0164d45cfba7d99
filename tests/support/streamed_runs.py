"""What a streamed run must have in its directory, whatever was killed while it ran."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from libra.config import RunConfig
from libra.facts import Fact, QuantumFinished, from_dict
from libra.observe.metrics import read_metrics
from libra.policy.log_replay import replay
from libra.store.event_log import read_events
from libra.store.run_records import groups_of, in_waves, read_batch_facts
from libra.store.trajectory_store import TrajectoryStore
from libra.weights import WeightStore
from libra.worker.run_spec import RunSpec
from libra.worker.training.checkpoint_writer import CheckpointWriter
from libra.worker.training.worker_trainer import make_replica, recover


def events_of(directory: Path) -> list[Fact]:
    return [from_dict(event).fact for event in read_events(directory / "events.jsonl").events]


def replayed_differences(events: Iterable[Fact]) -> list[str]:
    return [told.difference for told in replay(enumerate(events, start=1)) if told.difference]


def waves_of(directory: Path, batch: int) -> list[tuple[tuple[int, int], ...]]:
    return [groups_of(wave) for wave in in_waves(read_batch_facts(directory / "batches", batch)["groups"])]


def check_taken_again(directory: Path, config: RunConfig, steps: int, *, alone: bool = True) -> None:
    """A replica that begins with nothing but the committed batches comes to every published version, bit for bit.

    Unless the trainer was ``alone``: then up to the rounding of sums, of which Adam makes up to its step where gradients vanish.
    """
    spec = RunSpec("run", 0, directory, str(config.model.path), config)
    replica = make_replica(spec, spec.model_dir, None)
    checkpoints = CheckpointWriter(replica, directory / "none", config)
    store = WeightStore(directory / "weights")
    (directory / "checkpoints").rename(directory / "checkpoints aside")
    taken = recover(checkpoints, spec, WeightStore(directory / "no weights"), steps)
    if not alone:
        published = store.read(store.get(steps))
        for name, weight in replica.weights().items():
            apart = (published[name] - weight).abs()
            assert apart.max() <= config.trainer.lr * steps and (apart <= 2e-6).float().mean() >= 0.99, name
        return
    assert [step["digest"] for step in taken] == [store.get(version).digest for version in range(1, steps + 1)]


def check_whole(directory: Path, steps: int, config: RunConfig) -> None:
    """Every trajectory is stored once, every quantum was done once, every group is in one wave, of its own batch or in time."""
    trainer = config.trainer
    with TrajectoryStore.open(directory / "trajectories.zarr", mode="r") as stored:
        assert stored.num_trajectories == steps * trainer.prompts * trainer.group_size
    events = events_of(directory)
    finished = [event for event in events if isinstance(event, QuantumFinished)]
    quanta = Counter((event.key.split("-e")[0], event.quantum) for event in finished)
    assert quanta and set(quanta.values()) == {1}
    taken = [[group for wave in waves_of(directory, batch) for group in wave] for batch in range(steps)]
    every = [(batch, g) for batch in range(steps) for g in range(trainer.prompts)]
    assert sorted(group for groups in taken for group in groups) == every
    for batch, groups in enumerate(taken):
        assert len(groups) == trainer.prompts
        assert trainer.batches == "first_come" or all(iteration == batch for iteration, _ in groups)
    assert all(row["lag_max"] <= config.run.eta for row in read_metrics(directory) if "lag_max" in row)
    assert replayed_differences(events) == []
