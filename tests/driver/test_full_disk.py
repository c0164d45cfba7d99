"""A run on a file system that fills up for real: a clear error, nothing lost, and it goes on once there is space."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
import zarr

SIZE_MIB = 24


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own; skipped where this user may not mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def libra(repository: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from libra.cli.main import main; main()", *arguments]
    return subprocess.Popen(command, cwd=repository, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def fill(directory: Path) -> Path:
    """A file that takes every byte that is left."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return filler


@pytest.mark.timeout(170)
def test_a_run_whose_disk_fills_up_says_so_and_goes_on_when_there_is_space(
    small_disk: Path, random_model: Path, repository: Path, tmp_path: Path
) -> None:
    config = tmp_path / "full.yaml"
    values = {
        "run": {"dir": str(small_disk), "name": "run", "iterations": 400},
        "model": {"path": str(random_model)},
        "environment": {"name": "libra.testing:FixedTurns"},
        "rollout": {"max_new_tokens": 4, "max_turns": 3, "ignore_eos": True, "slots": 8},
        "trainer": {"prompts": 2, "group_size": 2},
        "cluster": {"threads": 1, "dashboard_port": 0},
        "observe": {"progress": False, "tensorboard": False},
    }
    config.write_text(yaml.safe_dump(values))
    first = libra(repository, "run", str(config))
    directory = small_disk / "run"
    while not (directory / "batches" / "batch-000002.json").exists():  # in the middle of everything
        assert first.poll() is None, first.communicate()[1]
    filler = fill(small_disk)
    _, said = first.communicate()
    assert first.returncode == 2, said
    assert "disk full; nothing that was committed is lost. Make space" in said
    before = len(list((directory / "batches").iterdir()))
    filler.unlink()
    second = libra(repository, "resume", str(directory), f"run.iterations={before + 3}")
    _, said = second.communicate()
    assert second.returncode == 0, said
    group = zarr.open_group(directory / "trajectories.zarr", mode="r")
    rows = group.attrs["committed"]["trajectories"]  # type: ignore[index, call-overload]
    columns = [group[f"trajectory/{name}"][:rows].tolist() for name in ("iteration", "group", "sample")]  # type: ignore[index]
    ids = sorted(zip(*columns, strict=True))
    assert ids == [(k, g, s) for k in range(before + 3) for g in range(2) for s in range(2)]
