"""The lease table against a model: conservation, order, bounded wait, quotas, enlargement, revocation; curves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import ConfigError
from libra.facts import Priority
from libra.policy.leases.elastic import SpeedUp
from libra.policy.leases.resources import Lease, LeaseRequest, Quota, Resources, Revoke, read_quota
from libra.policy.leases.table import LeaseTable

GIB = 2**30
WORKERS = {
    "a": Resources(slots=4, cores=4, memory_bytes=8 * GIB, gpus=1),
    "b": Resources(slots=8, cores=2, memory_bytes=4 * GIB),
    "c": Resources(slots=2, cores=8, memory_bytes=2 * GIB, gpus=2),
}
HOLDERS = [f"h{i}" for i in range(10)]
LIMITS = {"search": (3, 1.0), "judge": (2, None)}
TESTS = SpeedUp(1, 8, {1: 1.0, 2: 1.8, 4: 3.0, 8: 4.0})
SECONDS = {"tests": 1.0, "long": 60.0, "short": 0.5}
FIRST = Priority(-1, -1, -1)

VECTORS = st.builds(
    Resources, slots=st.just(1), cores=st.integers(0, 5), memory_bytes=st.sampled_from([0, GIB, 3 * GIB]),
    gpus=st.sampled_from([0, 0, 0, 1, 2]),
    quotas=st.sampled_from([(), (), (("search", 1),), (("judge", 1),), (("search", 2), ("judge", 1))]),
)  # fmt: skip
CORES = st.builds(Resources, slots=st.just(1), cores=st.integers(1, 4))
OTHERS = (
    st.tuples(st.just("release"), st.sampled_from(HOLDERS)), st.tuples(st.just("end"), st.sampled_from(HOLDERS)),
    st.tuples(st.just("cancel"), st.sampled_from(HOLDERS)),
    st.tuples(st.just("supply"), st.sampled_from(sorted(WORKERS))),
    st.tuples(st.just("withdraw"), st.sampled_from(sorted(WORKERS))),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.1, 0.5, 1.0])), st.tuples(st.just("admit")),
)  # fmt: skip


def _requests(vectors, tools):
    return st.tuples(st.just("request"), st.sampled_from(HOLDERS), vectors, st.integers(-1, 2), st.sampled_from(tools))


FULL = [*(("request", holder, Resources(slots=1, cores=2), 1, "long") for holder in HOLDERS[:3]), ("admit",)]
"""Long actions hold all cores of two workers, so that short ones have some stopped."""
MOVES = st.one_of(
    st.lists(st.one_of(_requests(VECTORS, ["", "tests", "long", "short"]), *OTHERS), max_size=70),
    st.lists(
        st.one_of(_requests(CORES, ["tests", "long", "short"]), OTHERS[-1], *OTHERS[:4]), min_size=5, max_size=50
    ).map(lambda moves: [*FULL, *moves]),
)


class Model:
    """A table, and what must be true of it whatever was done."""

    def __init__(self, curve=TESTS):
        self.table = LeaseTable()
        for name, (units, per_s) in LIMITS.items():
            self.table.limit(name, Quota(units, per_s))
        self.table.declare("tests", curve)
        for tool, seconds in SECONDS.items():  # actions of each have ended
            self.table.adopt(Lease("before", "gone", Resources(), 0, tool, 0.0))
            self.table.release("before", seconds)
        self.table.withdraw("gone")
        self.at_s = 0.0
        self.waiting = {}
        self.serial = 0
        self.searches = []
        self.revoked = set()
        self.first = set()
        self.num_revoked = 0

    def act(self, move):
        table = self.table
        match move:
            case ("request", holder, least, level, tool):
                if table.lease(holder) is not None:
                    return ()
                # the legal sizes of an elastic action begin at its least
                least = least.with_cores(1) if tool == "tests" else least
                home = "b" if level == 0 else ""
                revocable = tool in ("tests", "long")
                self._join(LeaseRequest(holder, least, tool, home, revocable=revocable), Priority(0, level, 0))
            case ("release", holder):
                table.release(holder)
                self.revoked.discard(holder)
            case ("end", holder):
                lease = table.lease(holder)
                table.release(holder, SECONDS.get(lease.tool, 1.0) if lease is not None else None)
                self.revoked.discard(holder)
            case ("cancel", holder):
                table.cancel(holder)
                self.waiting.pop(holder, None)
                self.first.discard(holder)
            case ("supply", worker):
                table.supply(worker, WORKERS[worker])
            case ("withdraw", worker):
                for lease in table.withdraw(worker):
                    self.revoked.discard(lease.holder)
            case ("wait", seconds):
                self.at_s += seconds
            case ("admit",):
                return self._admit()
        return ()

    def _join(self, request, priority):
        self.table.request(request, priority)
        self._moved(request, priority)

    def _moved(self, request, priority):
        self.serial += 1
        priority = FIRST if request.holder in self.first else priority
        self.waiting[request.holder] = ((priority, self.serial), request)

    def _admit(self):
        answers = self.table.admit(self.at_s)
        grants = [each for each in answers if isinstance(each, Lease)]
        order = [self.waiting[lease.holder][0] for lease in grants]
        assert order == sorted(order), "granted out of order"
        for lease in grants:
            _, request = self.waiting.pop(lease.holder)
            self.first.discard(lease.holder)
            self._check_grant(lease, request)
            self.searches += [self.at_s] * dict(request.least.quotas).get("search", 0)
        self._check_order(grants, order)
        self._check_revoked([each for each in answers if isinstance(each, Revoke)])
        return answers

    def _check_revoked(self, revokes):
        """Revocable leases of one worker that make room for the first that does not fit, each once, and none that is not needed."""
        if not revokes:
            return
        (waiting,), (worker,) = {each.reason.split()[0] for each in revokes}, {each.worker for each in revokes}
        leases = [self.table.lease(each.holder) for each in revokes]
        assert all(lease is not None and lease.revocable and lease.worker == worker for lease in leases)
        assert waiting not in self.first and not {each.holder for each in revokes} & self.revoked
        place, request = self.waiting[waiting]
        able = [p for p, r in self.waiting.values() if any(covers(WORKERS[w], r.least) for w in self.table.capacity())]
        assert place == min(able)
        free = [a - b for a, b in zip(WORKERS[worker].local, self.table.held(worker).local, strict=True)]
        given = [lease.resources.local for lease in leases if lease is not None]
        for left_out in (None, *range(len(given))):
            sums = [f + sum(a) for f, *a in zip(free, *(g for i, g in enumerate(given) if i != left_out), strict=True)]
            assert all(has >= want for has, want in zip(sums, request.least.local, strict=True)) == (left_out is None)
        self.revoked |= {each.holder for each in revokes}
        self.first.add(waiting)
        self.num_revoked += len(revokes)
        self.serial += 1
        self.waiting[waiting] = (FIRST, self.serial), request

    def _check_grant(self, lease, request):
        least, has = request.least, lease.resources
        assert has.with_cores(0) == least.with_cores(0)
        legal = TESTS.sizes if request.tool == "tests" else (least.cores,)
        assert has.cores >= least.cores
        assert has.cores in (*legal, least.cores)

    def _check_order(self, grants, order):
        """No request that fits is left, and nothing was granted past a request of the same kinds."""
        last = max(order, default=None)
        for place, request in self.waiting.values():
            if not any(covers(WORKERS[w], request.least) for w in self.table.capacity()):
                continue
            granted_kinds = {lease.holder: lease.resources.kinds for lease in grants}
            if last is not None and place < last:
                later = [h for h, where in zip(granted_kinds, order, strict=True) if where > place]
                assert all(granted_kinds[h] != request.least.kinds for h in later), f"{request} was passed by {later}"

    def check(self):
        """The invariants of `libra.policy.leases.table` that hold at any moment."""
        table = self.table
        capacity = table.capacity()
        for worker, has in capacity.items():
            mine = [lease.resources for lease in table.leases() if lease.worker == worker]
            sums = [sum(amounts) for amounts in zip(*(each.local for each in mine), strict=True)] or [0, 0, 0, 0]
            assert all(held <= there for held, there in zip(sums, has.local, strict=True)), (worker, sums)
            assert tuple(sums) == table.held(worker).local
        assert {lease.worker for lease in table.leases()} <= set(capacity)
        assert sum(dict(lease.resources.quotas).get("judge", 0) for lease in table.leases()) <= LIMITS["judge"][0]
        for begin_s in self.searches:
            assert sum(begin_s <= at_s < begin_s + 1.0 for at_s in self.searches) <= LIMITS["search"][0]
        assert not {lease.holder for lease in table.leases()} & set(self.waiting)
        assert all(table.waits(holder) for holder in self.waiting)
        assert table.num_waiting() == len(self.waiting)


def covers(has, needs):
    return all(there >= want for there, want in zip(has.local, needs.local, strict=True))


@given(MOVES)
def test_leases_are_conserved_in_order_and_within_quotas(moves):
    model = Model()
    for move in (("supply", "a"), ("supply", "b"), *moves):
        model.act(move)
        model.check()


@given(MOVES)
def test_an_admit_that_grants_nothing_changes_no_later_answer(moves):
    asked_often, asked_rarely = Model(), Model()
    for move in (("supply", "a"), ("supply", "b"), *moves):
        if move[0] != "admit":
            asked_often.act(move)
            asked_rarely.act(move)
        # `asked_rarely` is asked only where the other one granted or revoked something, as a replay is
        if (answers := asked_often.act(("admit",))) != ():
            assert asked_rarely.act(("admit",)) == answers


@given(MOVES)
def test_everything_that_waits_is_granted_once_the_others_end(moves):
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


@given(MOVES)
def test_enlargement_grants_the_same_requests_at_the_same_moment(moves):
    """Until cores that enlargement took are missed: the first admission from the same state grants the same."""
    model = Model()
    plain = Model(SpeedUp(1, 1, [1.0]))
    for move in (("supply", "a"), ("supply", "b"), *(move for move in moves if move[0] != "admit")):
        model.act(move)
        plain.act(move)
    larger = [lease for lease in model.table.admit(model.at_s) if isinstance(lease, Lease)]
    least = [lease for lease in plain.table.admit(plain.at_s) if isinstance(lease, Lease)]
    assert [(each.holder, each.worker) for each in larger] == [(each.holder, each.worker) for each in least]
    assert all(big.resources.cores >= small.resources.cores for big, small in zip(larger, least, strict=True))


def request(holder, cores=1, **more):
    fields = {"memory_bytes", "gpus", "quotas"} & set(more)
    return LeaseRequest(holder, Resources(slots=1, cores=cores, **{name: more.pop(name) for name in fields}), **more)


def ask(table, *requests, level=0):
    for order, each in enumerate(requests):
        table.request(each, Priority(0, level, order))


def one_worker(cores=4, **more):
    table = LeaseTable()
    table.supply("a", Resources(slots=64, cores=cores, **more))
    return table


def holders(answers):
    return [each.holder for each in answers if isinstance(each, Lease)]


def test_the_longest_prefix_is_granted_and_a_small_one_does_not_pass_a_large_one():
    table = one_worker(cores=4)
    ask(table, request("first", 3), request("large", 2), request("small", 1))
    assert holders(table.admit(0.0)) == ["first"]
    table.release("first")
    assert holders(table.admit(1.0)) == ["large", "small"]


def test_one_that_lacks_two_kinds_in_turn_is_passed_over_once_only():
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


def test_a_request_that_no_worker_can_take_holds_up_no_other():
    table = one_worker(cores=2)
    ask(table, request("huge", 16), request("small", 1))
    assert holders(table.admit(0.0)) == ["small"]
    assert [each.holder for each in table.stranded()] == ["huge"]
    table.supply("b", Resources(slots=1, cores=16))
    assert holders(table.admit(1.0)) == ["huge"]
    assert table.lease("huge").worker == "b"


def test_more_cores_go_to_who_gains_most_and_fewer_are_given_in_a_line():
    # a flat curve wastes cores that eight others wait for
    for waiting, flat in ((0, 4), (8, 1)):
        table = one_worker(cores=8)
        table.declare("steep", SpeedUp(1, 4, [1, 2, 3, 4]))
        table.declare("flat", SpeedUp(1, 4, [1, 1.4, 1.8, 2.1]))
        for _ in range(20):
            table.pressure.came(0, 8)
        ask(table, request("steep", 1, tool="steep"), request("flat", 1, tool="flat"))
        ask(table, *(request(f"large {i}", 8) for i in range(waiting)), level=1)
        sizes = {each.holder: each.resources.cores for each in table.admit(0.0) if isinstance(each, Lease)}
        assert sizes == {"steep": 4, "flat": flat}


def test_sizes_of_a_measured_tool_are_tried_and_then_used_by_their_speed():
    table = one_worker(cores=4)
    table.declare("tests", SpeedUp(1, 4, "measure"))
    seconds = {1: 8.0, 2: 4.0, 4: 9.0}  # four are no faster than one
    tried = []
    for i in range(16):
        ask(table, request(f"h{i}", 1, tool="tests"))
        (lease,) = table.admit(float(i))
        tried.append(lease.resources.cores)
        table.release(lease.holder, seconds[lease.resources.cores])
    assert sorted(tried[:12]) == [1] * 4 + [2] * 4 + [4] * 4
    assert tried[12:] == [2] * 4


def learned(cores=8, **seconds):
    table = one_worker(cores=cores)
    for tool, took_s in seconds.items():
        ask(table, request("first", 1, tool=tool))
        table.admit(0.0)
        table.release("first", took_s)
    return table


def test_nothing_is_stopped_that_costs_more_than_it_saves_or_is_not_known():
    for changed, expected in (
        ({}, 1),
        ({"revocable": False}, 0),
        ({"at_s": 45.0}, 0),  # it ends in 15 s, and 45 s of it would be lost
        ({"short": "long"}, 0),  # one that takes as long
        ({"short": "never seen"}, 0),
        ({"short": ""}, 0),
    ):
        table = learned(1, long=60.0, short=1.0)
        ask(table, request("runs", 1, tool="long", revocable=bool(changed.get("revocable", True))))
        table.admit(0.0)
        ask(table, request("waits", 1, tool=str(changed.get("short", "short"))))
        assert len(table.admit(float(changed.get("at_s", 5.0)))) == expected, changed


def test_speeds_are_relative_to_the_least_and_sizes_between_have_that_of_the_smaller():
    curve = SpeedUp(2, 8, {2: 2.0, 4: 3.0, 8: 4.0})
    assert curve.sizes == (2, 4, 8)
    assert [curve.speed(cores) for cores in (2, 3, 4, 7, 8)] == [1.0, 1.0, 1.5, 1.5, 2.0]
    assert SpeedUp(1, 3, [1, 1.5, 1.5]).speed(3) == 1.5


@pytest.mark.parametrize(
    "declared",
    [[1, -2, 3, 4], [1, 2, 1.5, 4], [1, 2], {2: 1.0}, {1: 1.0, 9: 2.0}, {1: 1.0, 2: float("nan")}, "measured"],
)
def test_a_curve_that_makes_no_sense_is_refused(declared):
    with pytest.raises(ConfigError, match="tool 'tests'"):
        SpeedUp(1, 4, declared, "tool 'tests'")


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.floats(0.0, 100.0)), max_size=100))
def test_a_measured_curve_never_falls_and_begins_at_one(samples):
    curve = SpeedUp(1, 8, "measure")
    for cores, seconds in samples:
        curve.ended(cores, seconds)
    speeds = [curve.speed(size) for size in curve.sizes]
    assert speeds == sorted(speeds)
    assert speeds[0] == 1.0
    counted = {size: sum(cores == size for cores, _ in samples) for size in curve.sizes}
    rarest = min(counted.values())
    assert curve.unmeasured(8) == (next(s for s in curve.sizes if counted[s] == rarest) if rarest < 4 else None)


@given(st.integers(1, 5), st.lists(st.tuples(st.sampled_from([0.0, 0.05, 0.3, 1.1]), st.integers(1, 3)), max_size=60))
def test_a_rate_holds_in_every_window_and_nothing_waits_longer_than_it_must(units, arrivals):
    quota, at_s, granted = Quota(units, 1.0), 0.0, list[tuple[float, int]]()
    for wait_s, wanted in arrivals:
        at_s += wait_s
        in_window = sum(u for t, u in granted if t + 1.0 > at_s)
        assert quota.may(at_s, wanted) == (in_window + wanted <= units)
        if wanted <= units:
            next_s = quota.next_s(at_s, wanted)
            assert sum(u for t, u in granted if t + 1.0 > next_s) + wanted <= units
        if quota.may(at_s, wanted):
            quota.take(at_s, wanted)
            granted.append((at_s, wanted))


def test_ten_a_second_is_never_exceeded_and_used_in_full():
    table, num, at_s, granted = LeaseTable(), 200, 0.0, list[float]()
    table.supply("a", Resources(slots=num))
    table.limit("search", read_quota("search", "10/s"))
    for number in range(num):
        table.request(LeaseRequest(str(number), Resources(1, quotas=(("search", 1),))), Priority(0, 0, 0))
    while len(granted) < num:
        at_s = table.next_s(at_s) or at_s
        for lease in table.admit(at_s):
            granted.append(at_s)
            table.release(lease.holder)
    assert all(later >= earlier + 1.0 for earlier, later in zip(granted, granted[10:], strict=False))
    assert granted[-1] < num / 10


@pytest.mark.parametrize(
    ("text", "units", "per_s"),
    [("10/s", 10, 1.0), (" 300 / min", 300, 60.0), ("5000/h", 5000, 3600.0), (4, 4, None), ("4", 4, None)],
)
def test_what_a_configuration_writes(text, units, per_s):
    quota = read_quota("search", text)
    assert (quota.units, quota.per_s) == (units, per_s)


@pytest.mark.parametrize("text", [0, "0/s", "-1/s", "ten/s", "10/day", True, "1.5/s"])
def test_what_is_no_quota_is_refused_with_what_to_type(text):
    with pytest.raises(ConfigError, match="search"):
        read_quota("search", text)
