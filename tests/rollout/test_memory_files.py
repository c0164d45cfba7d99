import os
import signal
from pathlib import Path

import pytest

from libra.rollout.memory_files import MemoryFiles

pytestmark = pytest.mark.live


@pytest.fixture
def children():
    started = []
    yield started
    for child in started:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def owner(parent):
    """A process that has made a directory with a file, and its path."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        files = MemoryFiles("libra-kv-", parent)
        (files.path / "1").write_bytes(b"kv")
        os.write(write, str(files.path).encode())
        while True:
            signal.pause()
    os.close(write)
    path = Path(os.read(read, 4096).decode())
    os.close(read)
    return child, path


def test_what_a_killed_process_left_is_removed_and_what_others_use_stays(tmp_path, children):
    (killed, left), (alive, used) = owner(tmp_path), owner(tmp_path)
    children.append(alive)
    (tmp_path / "other").mkdir()
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    assert (left / "1").exists(), "nobody could remove it"
    files = MemoryFiles("libra-kv-", tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([files.path, used, tmp_path / "other"])
    assert (used / "1").read_bytes() == b"kv"
    another = MemoryFiles("libra-kv-", tmp_path)
    assert files.path.is_dir(), "its own process has it"
    for each in (files, files, another):
        each.close()
    assert sorted(tmp_path.iterdir()) == sorted([used, tmp_path / "other"])
