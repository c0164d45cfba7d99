import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from libra.dispatch import Block, DispatchServer, fetch, orders, process_memory_copy, rows_of
from libra.dispatch import row_transfer as client_module
from libra.errors import DispatchError, LayoutError
from libra.transport import connect

SECRET = "known to the workers of one run"
sys.path.insert(0, str(Path(__file__).parent))
from server_process import row  # noqa: E402

Start = Callable[..., tuple[str, int]]


@pytest.fixture
def start():
    with contextlib.ExitStack() as stack:

        def started(name, rows, *, fault="none"):
            script = str(Path(__file__).with_name("server_process.py"))
            command = [sys.executable, script, name, SECRET, "7", fault, *map(str, rows)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            return "127.0.0.1", int(process.stdout.readline())

        yield started


def block(name, rows):
    return Block(name, "part", tuple(rows), tuple(2**20 + number for number in rows))


def order(holders, wanted, addresses):
    return orders([block(name, rows) for name, rows in holders.items()], {"me": wanted}, addresses)["me"]


def as_made(data, wanted):
    return bytes(data) == b"".join(bytes(row(7, number)) for number in wanted)


@pytest.mark.live
@pytest.mark.parametrize("neighbours", [True, False])
def test_rows_of_several_processes_arrive_in_the_order_wanted(start, neighbours):
    holders = {"a": [0, 1, 2, 3], "b": [4, 5], "me": [6, 7]}
    addresses = {name: start(name, rows) for name, rows in holders.items() if name != "me"}
    own = DispatchServer("me", SECRET, "127.0.0.1")
    own.offer("part", [6, 7], [row(7, 6), row(7, 7)])
    asked = order(holders, [5, 6, 1, 2, 7, 3], addresses)
    fetched = fetch(asked, "me", secret=SECRET, own=own, neighbours=neighbours)
    own.close()
    assert as_made(fetched.data, [5, 6, 1, 2, 7, 3])
    assert fetched.local_bytes == 2 * 2**20 + 13
    assert fetched.received_bytes == 4 * 2**20 + 11
    assert fetched.failed == {}
    views = rows_of(fetched, asked)
    assert list(views) == [5, 6, 1, 2, 7, 3]
    assert all(views[number] == row(7, number).data for number in (5, 7))


@pytest.mark.live
@pytest.mark.parametrize("fault", ["dies", "garbles"])
def test_a_server_that_fails_during_a_move_is_left_for_another(start, fault):
    holders = {"a": [0, 1, 2], "b": [0, 1, 2]}
    addresses = {"a": start("a", [0, 1, 2], fault=fault), "b": start("b", [0, 1, 2])}
    fetched = fetch(order(holders, [2, 0, 1], addresses), "me", secret=SECRET, neighbours=False)
    assert as_made(fetched.data, [2, 0, 1])
    assert list(fetched.failed) == ["a"]
    alone = {"a": start("a", [0, 1, 2], fault=fault)}
    with pytest.raises(DispatchError, match="only a had 3 of its rows"):
        fetch(order({"a": [0, 1, 2]}, [2, 0, 1], alone), "me", secret=SECRET, neighbours=False)


@pytest.mark.live
def test_a_neighbour_whose_memory_cannot_be_read_sends_it(start, monkeypatch):
    asked = []
    monkeypatch.setattr(client_module, "can_read", lambda offer: bool(asked.append(offer["pid"])))
    fetched = fetch(order({"a": [0, 1]}, [1, 0], {"a": start("a", [0, 1])}), "me", secret=SECRET)
    assert as_made(fetched.data, [1, 0])
    assert len(asked) == 1


@pytest.mark.live
def test_a_neighbour_that_is_somebody_else_is_not_read(start, monkeypatch):
    """A process id of another namespace, or memory that differs from the offer."""
    seen = []

    def wrong(offer):
        offer["probe"] = [offer["runs"][0][0], "00" * 32]
        seen.append(process_memory_copy.can_read(offer))
        return seen[-1]

    monkeypatch.setattr(client_module, "can_read", wrong)
    fetched = fetch(order({"a": [0]}, [0], {"a": start("a", [0])}), "me", secret=SECRET)
    assert seen == [False]
    assert as_made(fetched.data, [0])


@pytest.fixture
def server():
    serving = DispatchServer("a", SECRET, "127.0.0.1")
    yield serving
    serving.close()


def test_a_client_without_the_secret_gets_nothing_and_others_go_on(server):
    held = server.offer("part", [0], [b"payload"])
    asked = orders([held], {"me": [0]}, {"a": server.address})["me"]
    with pytest.raises(DispatchError):
        fetch(asked, "me", secret="of another run")
    assert bytes(fetch(asked, "me", secret=SECRET).data) == b"payload"
    server.withdraw("part")
    with pytest.raises(DispatchError):
        fetch(asked, "me", secret=SECRET)


@pytest.mark.parametrize("pieces", [[["part", 3, 9]], [["part", -1, 2]], [["other", 0, 1]]])
def test_only_runs_inside_a_block_can_be_asked_for(server, pieces):
    server.offer("part", [0], [b"payload"])
    channel = connect(server.address, SECRET, purpose="dispatch")
    channel.send_frame(pieces=pieces)
    answer = channel.recv_frame()
    channel.close()
    assert answer is not None and answer["error"]


def test_an_array_is_offered_where_it_lies_and_rows_without_bytes_are_no_trouble(server):
    empty = server.offer("some", [0, 1, 2], [b"", b"ab", b""])
    asked = orders([empty], {"me": [2, 1, 0], "idle": []}, {"a": server.address})
    assert bytes(fetch(asked["me"], "me", secret=SECRET).data) == b"ab"
    assert fetch(asked["idle"], "idle", secret=SECRET).data.size == 0
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    held = server.offer_array("part", "wxyz", array)
    array[2] = 99
    fetched = fetch(orders([held], {"me": ["y", "x"]}, {"a": server.address})["me"], "me", secret=SECRET)
    assert fetched.data.view(np.float32).tolist() == [99, 99, 99, 3, 4, 5]
    with pytest.raises(LayoutError):
        server.offer_array("columns", "xyz", array.T)
    with pytest.raises(LayoutError):
        server.offer_array("part", "wxyz", array)
