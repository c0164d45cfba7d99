"""The state of a run: which workers are asked for a version, and in which order."""

from hypothesis import given
from hypothesis import strategies as st

from libra.scheduler.run_state import Holders

TRAINER, NEAR, FAR, ASKER = "tcp://a:1", "tcp://b:1", "tcp://c:1", "tcp://b:2"


def test_nearest_first_and_the_trainer_last():
    holders = Holders()
    holders.offers(TRAINER, ("a", 11), trains=True)
    holders.has(TRAINER, 3, "digest")
    assert holders.nearest(3, ASKER) == [("a", 11)]
    for worker, at in ((FAR, ("c", 13)), (NEAR, ("b", 12)), (ASKER, ("b", 22))):
        holders.offers(worker, at)
        holders.has(worker, 3)
    assert holders.nearest(3, ASKER) == [("b", 12), ("c", 13), ("a", 11)]
    assert holders.nearest(4, ASKER) == []
    holders.lost(NEAR)
    assert holders.nearest(3, ASKER) == [("c", 13), ("a", 11)]
    assert holders.digest(3) == "digest" and holders.digest(4) is None


@given(
    st.lists(st.tuples(st.sampled_from(["offers", "has", "lost"]), st.integers(0, 4), st.integers(0, 2)), max_size=30)
)
def test_only_who_is_there_and_has_it_is_named(moves):
    holders, there, has = Holders(), set(), set()
    for move, worker, version in moves:
        name = f"tcp://{worker}:1"
        if move == "offers":
            holders.offers(name, (str(worker), 1))
            there.add(worker)
        elif move == "has":
            holders.has(name, version)
            has.add((worker, version))
        else:
            holders.lost(name)
            there.discard(worker)
            has = {pair for pair in has if pair[0] != worker}
    for version in range(3):
        named = {int(host) for host, _ in holders.nearest(version, "tcp://4:1")}
        assert named == {worker for worker in there if (worker, version) in has and worker != 4}
