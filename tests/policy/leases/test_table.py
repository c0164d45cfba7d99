"""The lease table against a model: conservation, order, bounded wait, quotas, enlargement, sessions."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.policy import Priority
from libra.policy.leases import Lease, LeaseRequest, LeaseTable, Quota, Resources, Revoke, SpeedUp

GIB = 2**30
WORKERS = {
    "a": Resources(slots=4, cores=4, memory_bytes=8 * GIB, gpus=1),
    "b": Resources(slots=8, cores=2, memory_bytes=4 * GIB),
    "c": Resources(slots=2, cores=8, memory_bytes=2 * GIB, gpus=2),
}
HOLDERS = [f"h{i}" for i in range(10)]
LIMITS = {"search": (3, 1.0), "judge": (2, None)}
TESTS = SpeedUp(1, 8, {1: 1.0, 2: 1.8, 4: 3.0, 8: 4.0})

VECTORS = st.builds(
    Resources,
    slots=st.just(1),
    cores=st.integers(0, 5),
    memory_bytes=st.sampled_from([0, GIB, 3 * GIB]),
    gpus=st.sampled_from([0, 0, 0, 1, 2]),
    quotas=st.sampled_from([(), (), (("search", 1),), (("judge", 1),), (("search", 2), ("judge", 1))]),
)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("request"), st.sampled_from(HOLDERS), VECTORS, st.integers(-1, 2), st.booleans()),
        st.tuples(st.just("session"), st.sampled_from(HOLDERS), VECTORS, st.integers(0, 1), st.booleans()),
        st.tuples(st.just("release"), st.sampled_from(HOLDERS)),
        st.tuples(st.just("cancel"), st.sampled_from(HOLDERS)),
        st.tuples(st.just("reorder"), st.sampled_from(HOLDERS), st.integers(-1, 2)),
        st.tuples(st.just("supply"), st.sampled_from(sorted(WORKERS))),
        st.tuples(st.just("withdraw"), st.sampled_from(sorted(WORKERS))),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        st.tuples(st.just("admit")),
    ),
    max_size=70,
)


class Model:
    """A table, and what must be true of it whatever was done."""

    def __init__(self, **options: Any) -> None:
        self.table = LeaseTable(**options)
        for name, (units, per_s) in LIMITS.items():
            self.table.limit(name, Quota(units, per_s))
        self.table.declare("tests", TESTS)
        self.at_s = 0.0
        self.waiting: dict[str, tuple[tuple[Priority, int], LeaseRequest]] = {}
        self.serial = 0
        self.searches: list[float] = []

    def act(self, move: tuple[Any, ...]) -> tuple[Lease | Revoke, ...]:
        """Do one thing; returns the answers of `admit`."""
        table = self.table
        match move:
            case ("request" | "session" as kind, holder, least, level, elastic):
                if table.lease(holder) is not None:
                    return ()
                session = kind == "session"
                # the legal sizes of an elastic action begin at its least
                least = least.with_cores(1) if elastic and not session else least
                request = LeaseRequest(
                    holder, least, "tests" if elastic and not session else "", "b" if level == 0 else "",
                    hold_s=1.0 if session else None, revocable=session and elastic, price_s=float(level) if session else 0.0,
                )  # fmt: skip
                self._join(request, Priority(0, level, 0))
            case ("reorder", holder, level):
                if holder in self.waiting:
                    table.reorder(holder, Priority(0, level, 0))
                    self._moved(self.waiting[holder][1], Priority(0, level, 0))
            case ("release", holder):
                table.release(holder, 1.0)
            case ("cancel", holder):
                table.cancel(holder)
                self.waiting.pop(holder, None)
            case ("supply", worker):
                table.supply(worker, WORKERS[worker])
            case ("withdraw", worker):
                table.withdraw(worker)
            case ("wait", seconds):
                self.at_s += seconds
                table.expired(self.at_s)
            case ("admit",):
                return self._admit()
        return ()

    def _join(self, request: LeaseRequest, priority: Priority) -> None:
        self.table.request(request, priority)
        self._moved(request, priority)

    def _moved(self, request: LeaseRequest, priority: Priority) -> None:
        self.serial += 1
        self.waiting[request.holder] = ((priority, self.serial), request)

    def _admit(self) -> tuple[Lease | Revoke, ...]:
        answers = self.table.admit(self.at_s)
        grants = [each for each in answers if isinstance(each, Lease)]
        order = [self.waiting[lease.holder][0] for lease in grants]
        assert order == sorted(order), "granted out of order"
        for lease in grants:
            _, request = self.waiting.pop(lease.holder)
            self._check_grant(lease, request)
            self.searches += [self.at_s] * dict(request.least.quotas).get("search", 0)
        self._check_order(grants, order)
        return answers

    def _check_grant(self, lease: Lease, request: LeaseRequest) -> None:
        least, has = request.least, lease.resources
        assert has.with_cores(0) == least.with_cores(0)
        legal = TESTS.sizes if request.tool == "tests" else (least.cores,)
        assert has.cores >= least.cores
        assert has.cores in (*legal, least.cores)

    def _check_order(self, grants: list[Lease], order: list[Any]) -> None:
        """No request that fits is left, and nothing was granted past a request of the same kinds."""
        last = max(order, default=None)
        for place, request in self.waiting.values():
            if not any(covers(WORKERS[w], request.least) for w in self.table.capacity()):
                continue
            granted_kinds = {lease.holder: lease.resources.kinds for lease in grants}
            if last is not None and place < last:
                later = [h for h, where in zip(granted_kinds, order, strict=True) if where > place]
                assert all(granted_kinds[h] != request.least.kinds for h in later), (
                    f"{request} was passed over by {later}"
                )

    def check(self) -> None:
        """The invariants of `libra.policy.leases.table` that hold at any moment."""
        table = self.table
        capacity = table.capacity()
        for worker, has in capacity.items():
            mine = [lease.resources for lease in table.leases() if lease.worker == worker]
            sums = [sum(amounts) for amounts in zip(*(each.local for each in mine), strict=True)] or [0, 0, 0, 0]
            assert all(held <= there for held, there in zip(sums, has.local, strict=True)), (worker, sums)
            assert tuple(sums) == table.held(worker).local
        assert {lease.worker for lease in table.leases()} <= set(capacity)
        judges = sum(dict(lease.resources.quotas).get("judge", 0) for lease in table.leases())
        assert judges <= LIMITS["judge"][0]
        for begin_s in self.searches:
            assert sum(begin_s <= at_s < begin_s + 1.0 for at_s in self.searches) <= LIMITS["search"][0]
        holders = {lease.holder for lease in table.leases()}
        assert not holders & set(self.waiting)
        assert all(table.waits(holder) for holder in self.waiting)
        assert table.num_waiting() == len(self.waiting)


def covers(has: Resources, needs: Resources) -> bool:
    return all(there >= want for there, want in zip(has.local, needs.local, strict=True))


@settings(max_examples=300, deadline=None)
@given(MOVES)
def test_leases_are_conserved_in_order_and_within_quotas(moves: list[tuple[Any, ...]]) -> None:
    model = Model()
    for move in (("supply", "a"), ("supply", "b"), *moves):
        model.act(move)
        model.check()


@settings(max_examples=150, deadline=None)
@given(MOVES)
def test_an_admit_that_grants_nothing_changes_no_later_answer(moves: list[tuple[Any, ...]]) -> None:
    asked_often, asked_rarely = Model(), Model()
    for move in (("supply", "a"), ("supply", "b"), *moves):
        if move[0] != "admit":
            asked_often.act(move)
            asked_rarely.act(move)
        # `asked_rarely` is asked only where the other one granted or revoked something, as a replay is
        if (answers := asked_often.act(("admit",))) != ():
            assert asked_rarely.act(("admit",)) == answers


@settings(max_examples=150, deadline=None)
@given(MOVES)
def test_everything_that_waits_is_granted_once_the_others_end(moves: list[tuple[Any, ...]]) -> None:
    model = Model()
    for move in (*((("supply", name)) for name in WORKERS), *moves, *((("supply", name)) for name in WORKERS)):
        model.act(move)
    for _ in range(4 * len(HOLDERS)):
        model.act(("admit",))
        model.act(("wait", 1.0))
        for lease in model.table.leases():
            model.table.release(lease.holder)
        model.check()
    impossible = {h for h, (_, r) in model.waiting.items() if not any(covers(has, r.least) for has in WORKERS.values())}
    assert set(model.waiting) == impossible == {request.holder for request in model.table.stranded()}


@settings(max_examples=100, deadline=None)
@given(MOVES)
def test_enlargement_grants_the_same_requests_at_the_same_moment(moves: list[tuple[Any, ...]]) -> None:
    """Until cores that enlargement took are missed: the first admission from the same state grants the same."""
    model = Model()
    plain = Model(enlarges=False)
    for move in (("supply", "a"), ("supply", "b"), *(move for move in moves if move[0] != "admit")):
        model.act(move)
        plain.act(move)
    larger = [lease for lease in model.table.admit(model.at_s) if isinstance(lease, Lease)]
    least = [lease for lease in plain.table.admit(plain.at_s) if isinstance(lease, Lease)]
    assert [(each.holder, each.worker) for each in larger] == [(each.holder, each.worker) for each in least]
    assert all(big.resources.cores >= small.resources.cores for big, small in zip(larger, least, strict=True))


def request(holder: str, cores: int = 1, **more: Any) -> LeaseRequest:
    fields = {"memory_bytes", "gpus", "quotas"} & set(more)
    vector = Resources(slots=1, cores=cores, **{name: more.pop(name) for name in fields})
    return LeaseRequest(holder, vector, **more)


def ask(table: LeaseTable, *requests: LeaseRequest, level: int = 0) -> None:
    for order, each in enumerate(requests):
        table.request(each, Priority(0, level, order))


def one_worker(cores: int = 4, **more: Any) -> LeaseTable:
    table = LeaseTable()
    table.supply("a", Resources(slots=64, cores=cores, **more))
    return table


def holders(answers: tuple[Lease | Revoke, ...]) -> list[str]:
    return [each.holder for each in answers if isinstance(each, Lease)]


def test_the_longest_prefix_is_granted_and_a_small_one_does_not_pass_a_large_one() -> None:
    table = one_worker(cores=4)
    ask(table, request("first", 3), request("large", 2), request("small", 1))
    assert holders(table.admit(0.0)) == ["first"]
    table.release("first")
    assert holders(table.admit(1.0)) == ["large", "small"]


def test_a_smaller_level_goes_first_and_one_that_wants_other_kinds_is_not_held_up() -> None:
    table = one_worker(cores=2, gpus=1)
    ask(table, request("late", 2), level=1)
    ask(table, request("early", 2), level=0)
    ask(table, request("judge", 0, gpus=1), level=2)
    assert holders(table.admit(0.0)) == ["early", "judge"]


def test_one_that_lacks_two_kinds_in_turn_is_passed_over_once_only() -> None:
    """Without what it keeps, cores and GPU would be taken by others in turn for ever."""
    table = one_worker(cores=2, gpus=1)
    ask(table, request("holds cores", 2), request("both", 2, gpus=1), request("judge 0", 0, gpus=1))
    assert holders(table.admit(0.0)) == ["holds cores", "judge 0"]
    for round_ in range(1, 4):
        ask(table, request(f"cores {round_}", 2), request(f"judge {round_}", 0, gpus=1), level=1)
    table.release("holds cores")
    assert holders(table.admit(1.0)) == []  # the GPU is missing now, and the cores are kept for it
    table.release("judge 0")
    assert holders(table.admit(2.0)) == ["both"]


def test_a_request_that_no_worker_can_take_holds_up_no_other() -> None:
    table = one_worker(cores=2)
    ask(table, request("huge", 16), request("small", 1))
    assert holders(table.admit(0.0)) == ["small"]
    assert [each.holder for each in table.stranded()] == ["huge"]
    table.supply("b", Resources(slots=1, cores=16))
    assert holders(table.admit(1.0)) == ["huge"]
    assert table.lease("huge").worker == "b"  # type: ignore[union-attr]


def test_a_lost_worker_takes_its_leases_with_it() -> None:
    table = one_worker(cores=2)
    ask(table, request("one", 2), request("two", 2))
    table.admit(0.0)
    assert [lease.holder for lease in table.withdraw("a")] == ["one"]
    assert table.leases() == ()
    table.supply("a", Resources(slots=4, cores=2))
    assert holders(table.admit(1.0)) == ["two"]


def test_more_cores_go_to_who_gains_most_and_fewer_are_given_in_a_line() -> None:
    table = one_worker(cores=8)
    table.declare("steep", SpeedUp(1, 4, [1, 2, 3, 4]))
    table.declare("flat", SpeedUp(1, 4, [1, 1.4, 1.8, 2.1]))
    for _ in range(20):
        table.pressure.came(0, 8)
    ask(table, request("steep", 1, tool="steep"), request("flat", 1, tool="flat"))
    sizes = {each.holder: each.resources.cores for each in table.admit(0.0) if isinstance(each, Lease)}
    assert sizes == {"steep": 4, "flat": 4}
    crowded = one_worker(cores=8)
    crowded.declare("steep", SpeedUp(1, 4, [1, 2, 3, 4]))
    crowded.declare("flat", SpeedUp(1, 4, [1, 1.4, 1.8, 2.1]))
    for _ in range(20):
        crowded.pressure.came(0, 8)
    ask(crowded, request("steep", 1, tool="steep"), request("flat", 1, tool="flat"))
    ask(crowded, *(request(f"large {i}", 8) for i in range(8)), level=1)
    sizes = {each.holder: each.resources.cores for each in crowded.admit(0.0) if isinstance(each, Lease)}
    assert sizes == {"steep": 4, "flat": 1}  # a flat curve wastes cores that eight others wait for


def test_sizes_of_a_measured_tool_are_tried_and_then_used_by_their_speed() -> None:
    table = one_worker(cores=4)
    table.declare("tests", SpeedUp(1, 4, "measure"))
    seconds = {1: 8.0, 2: 4.0, 4: 9.0}  # four are no faster than one
    tried = []
    for i in range(16):
        ask(table, request(f"h{i}", 1, tool="tests"))
        (lease,) = table.admit(float(i))
        assert isinstance(lease, Lease)
        tried.append(lease.resources.cores)
        table.release(lease.holder, seconds[lease.resources.cores])
    assert sorted(tried[:12]) == [1] * 4 + [2] * 4 + [4] * 4
    assert tried[12:] == [2] * 4


def test_a_session_is_held_while_it_is_used_and_a_retry_waits_its_time() -> None:
    table = one_worker(cores=0, memory_bytes=4 * GIB)
    ask(table, request("session", 0, memory_bytes=3 * GIB, hold_s=10.0))
    table.admit(0.0)
    ask(table, request("other", 0, memory_bytes=2 * GIB))
    assert holders(table.admit(5.0)) == []
    assert table.next_s(5.0) == 10.0
    table.touch("session", 6.0)
    assert table.expired(12.0) == ()
    assert [lease.holder for lease in table.expired(16.0)] == ["session"]
    assert holders(table.admit(16.0)) == ["other"]
    ask(table, request("retry", 0, not_before_s=20.0))
    assert holders(table.admit(19.0)) == []
    assert table.next_s(19.0) == 20.0
    assert holders(table.admit(20.0)) == ["retry"]


def test_the_cheapest_revocable_leases_make_room_and_only_once() -> None:
    table = one_worker(cores=0, memory_bytes=4 * GIB)
    for name, price_s, at_s in (("dear", 9.0, 0.0), ("old", 1.0, 1.0), ("new", 1.0, 2.0)):
        ask(table, request(name, 0, memory_bytes=GIB, hold_s=1e6, revocable=True, price_s=price_s))
        table.admit(at_s)
    ask(table, request("needs", 0, memory_bytes=2 * GIB))
    (revoke,) = table.admit(3.0)
    assert isinstance(revoke, Revoke)
    assert (revoke.holder, revoke.worker) == ("old", "a")
    assert table.admit(3.5) == ()
    table.release("old")
    assert holders(table.admit(4.0)) == ["needs"]


def test_requests_and_leases_are_plain_values() -> None:
    """They go into the event log."""
    vector = Resources(1, 2, GIB, 1, (("search", 1),))
    assert msgspec.json.decode(msgspec.json.encode(LeaseRequest("h", vector)), type=LeaseRequest).least == vector
