import datetime
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from libra.errors import GroupLost, TransportError
from libra.train.replica_group import MemberStore, Rendezvous, TrainGroup

TOKEN = "of this group"


@pytest.fixture(name="rendezvous")
def _rendezvous():
    rendezvous = Rendezvous(TOKEN, "127.0.0.1")
    yield rendezvous
    rendezvous.close()


def test_members_see_what_others_set(rendezvous):
    stores = [MemberStore(rendezvous.address, TOKEN, 60) for _ in range(2)]
    one, other = (dist.PrefixStore("epoch", store) for store in stores)
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(other.get, "late")
        one.set("late", b"\0\xff")
        assert waits.result(60) == b"\0\xff"
    assert (one.add("count", 2), other.add("count", 3)) == (2, 5)
    other.wait(["late", "count"], datetime.timedelta(seconds=60))
    assert one.check(["late"]) and not one.check(["late", "never"])
    assert other.delete_key("late") and not one.check(["late"])


def test_what_nobody_sets_is_waited_for_until_the_timeout(rendezvous):
    store = MemberStore(rendezvous.address, TOKEN, 0.01)
    with pytest.raises(RuntimeError, match="never"):
        store.get("never")
    rendezvous.close()
    with pytest.raises(RuntimeError):
        store.set("a", b"b")


def test_a_stranger_neither_reads_nor_writes(rendezvous):
    with pytest.raises(TransportError, match="secret"):
        MemberStore(rendezvous.address, "guessed", 0.01)
    with pytest.raises(GroupLost, match="secret"):
        TrainGroup.join(rendezvous.address, 1, 2, token="guessed", timeout_s=0.01)
    with socket.create_connection(rendezvous.address) as connection:  # in the words of torch's own store
        connection.sendall(b"\x00\x00\x00\x00epoch/0" + bytes(100))
    assert MemberStore(rendezvous.address, TOKEN, 60).num_keys() == 0


class Overheard(TrainGroup):
    """A group in which somebody answers as rank 1 who repeats what he reads."""

    def _gather_bytes(self, value):
        return [value, value]


def test_who_takes_a_members_place_without_the_token_ends_the_group():
    with pytest.raises(GroupLost, match="rank 1"):
        Overheard(0, 2)._check_members(TOKEN, 0)
