import contextlib
import subprocess
import sys

import numpy as np
import pytest
import row_sender

from libra.transport import connect
from libra.transport import rows as transport_rows
from libra.transport.rows import RowServer, fetch_rows

SECRET = "known to the workers of one run"


@pytest.fixture
def start():
    with contextlib.ExitStack() as stack:

        def started(*rows, fault="none"):
            command = [sys.executable, row_sender.__file__, SECRET, fault, *rows]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            return "127.0.0.1", int(process.stdout.readline())

        yield started


def are_as_made(rows):
    return all(bytes(view) == bytes(row_sender.row(int(name))) for name, view in rows.items())


@pytest.mark.live
@pytest.mark.parametrize("neighbours", [True, False])
def test_rows_of_several_processes_arrive(start, neighbours):
    wanted = {start("0", "1", "2", "3"): ["1", "2", "3"], start("4", "5"): ["5"]}
    fetched = fetch_rows(wanted, SECRET, neighbours=neighbours)
    assert list(fetched.rows) == ["1", "2", "3", "5"] and are_as_made(fetched.rows)
    assert fetched.num_bytes == 4 * 2**20 + 11 and fetched.failed == {}


@pytest.mark.live
@pytest.mark.parametrize("fault", ["dies", "garbles"])
def test_of_a_server_that_fails_nothing_arrives_and_its_error_is_named(start, fault):
    whole, faulty = start("0", "1"), start("2", "3", fault=fault)
    fetched = fetch_rows({whole: ["0"], faulty: ["3", "2"]}, SECRET, neighbours=False)
    assert list(fetched.rows) == ["0"] and are_as_made(fetched.rows)
    assert list(fetched.failed) == [faulty]


@pytest.mark.live
def test_a_neighbour_whose_memory_cannot_be_read_sends_it(start, monkeypatch):
    asked = []
    monkeypatch.setattr(transport_rows, "can_read", lambda offer: bool(asked.append(offer["pid"])))
    assert are_as_made(fetch_rows({start("0", "1"): ["1", "0"]}, SECRET).rows)
    assert len(asked) == 1


@pytest.mark.live
def test_a_neighbour_that_is_somebody_else_is_not_read(start, monkeypatch):
    """A process id of another namespace, or memory that differs from the offer."""
    seen, can_read = [], transport_rows.can_read

    def wrong(offer):
        offer["probe"] = [offer["runs"][0][0], "00" * 32]
        seen.append(can_read(offer))
        return seen[-1]

    monkeypatch.setattr(transport_rows, "can_read", wrong)
    fetched = fetch_rows({start("0"): ["0"]}, SECRET)
    assert seen == [False]
    assert list(fetched.rows) == ["0"] and are_as_made(fetched.rows)


@pytest.fixture
def server():
    serving = RowServer(SECRET, "127.0.0.1")
    yield serving
    serving.close()


def test_a_client_without_the_secret_gets_nothing_and_others_go_on(server):
    server.offer({"a": b"payload"})
    wanted = {server.address: ["a"]}
    refused = fetch_rows(wanted, "of another run")
    assert refused.rows == {} and list(refused.failed) == [server.address]
    assert bytes(fetch_rows(wanted, SECRET).rows["a"]) == b"payload"
    server.withdraw(["a", "b"])
    assert list(fetch_rows(wanted, SECRET).failed) == [server.address] and "a" not in server


def test_only_rows_that_are_offered_can_be_asked_for(server):
    server.offer({"a": b"payload"})
    channel = connect(server.address, SECRET, purpose="rows")
    channel.send_frame(rows=["a", "b"])
    answer = channel.recv_frame()
    channel.close()
    assert answer is not None and answer["error"]


def test_an_array_is_offered_where_it_lies_and_rows_without_bytes_are_no_trouble(server):
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    server.offer({"w": b"", **dict(zip("xyz", array[1:], strict=True))})
    array[2] = 99
    rows = fetch_rows({server.address: ["y", "w", "x"]}, SECRET).rows
    assert [np.frombuffer(rows[name], np.float32).tolist() for name in "ywx"] == [[99, 99, 99], [], [3, 4, 5]]
    assert fetch_rows({server.address: ["w"]}, SECRET).num_bytes == 0
    assert fetch_rows({}, SECRET).rows == {}
    with pytest.raises(TypeError):
        server.offer({"columns": array.T})
