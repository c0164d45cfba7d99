"""Ways in which workers may be arranged: what can be had, in which steps, and what is missing for the rest."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.facts import RoleStage
from libra.planner.arrangements import (
    REBUCKET,
    ROLES,
    SLOTS,
    Seat,
    arranged,
    arrangements,
    blocked,
    kinds_of_change,
    limits_for,
    steps_to,
)
from libra.policy.role_changes import Assignment, Refuse, Role, Roles

ROLE = {"rollout": Role.ROLLOUT, "train": Role.TRAIN, "lent": Role.LENT}
NAMES = ("a", "b", "c", "d")


def seat(name, host="node", **more):
    return Seat(name, host, "vllm", "vllm-tp1-threads1", 1, 4, **{"may_change": True, **more})


def anything(engine, tp):
    return ""


def no_tp(engine, tp):
    return "rollout.engine=vllm"


def shown(option):
    return tuple(e.workers for e in option.engines), tuple(sorted(option.training))


def test_two_hybrids_roll_out_alone_or_together_or_train():
    seats = [seat("rollout-0"), seat("rollout-1"), seat("rollout-2", may_change=False)]
    assert [shown(option) for option in arrangements(seats, anything)] == [
        ((("rollout-0",), ("rollout-1",), ("rollout-2",)), ()), ((("rollout-0", "rollout-1"), ("rollout-2",)), ()),
        ((("rollout-1",), ("rollout-2",)), ("rollout-0",)), ((("rollout-2",),), ("rollout-0", "rollout-1")),
    ]  # fmt: skip
    assert len(arrangements(seats, no_tp)) == 3
    assert len(arrangements([seat("a"), seat("b", host="other")], anything)) == 2, "no engine spans two nodes"
    assert all(option.engines for option in arrangements([seat("a"), seat("b")], anything)), "some engine stays"


def test_the_fewest_workers_are_moved_and_those_with_the_least_to_lose():
    seats = [
        seat("a", residents=3), seat("b", role="train", residents=9), seat("c", residents=1), seat("d", residents=1),
    ]  # fmt: skip
    by_count = {len(option.training): option.training for option in arrangements(seats, no_tp)}
    assert by_count[1] == {"b"}
    assert by_count[2] == {"b", "c"}
    assert by_count[3] == {"b", "c", "d"}


def test_an_engine_of_two_is_one_engine_with_all_their_slots_and_its_own_limit():
    seats = [
        seat("a", bond=frozenset({"b"}), limits={1: 3, 2: 5}),
        seat("b", role="lent", bond=frozenset({"a"})),
        seat("c", limits={1: 2}),
    ]
    lead, alone = arranged(seats).engines
    assert (lead.workers, lead.tp, lead.slots, lead.full_slots) == (("a", "b"), 2, 5, 8)
    assert lead.kind == "vllm-tp2-threads1-slots8"
    assert (alone.workers, alone.slots, alone.full_slots) == (("c",), 2, 4)


HALF = [seat("rollout-0"), seat("rollout-1", may_change=False)]


@pytest.mark.parametrize(("seats", "may_have", "missing"), [
    (HALF, anything, "cluster.hybrid_workers=2"),
    ([seat("rollout-0", "x"), seat("rollout-1", "y")], anything, "of one node"),
    ([seat("rollout-0"), seat("rollout-1")], no_tp, "rollout.engine=vllm"),
    (HALF, anything, "one more worker that trains"), ([seat("rollout-0")], anything, "rollout.slots=8"),
])  # fmt: skip
def test_what_cannot_be_had_names_what_is_missing(seats, may_have, missing):
    said = [option.missing for option in blocked(seats, may_have)]
    assert any(missing in text for text in said), said
    can = [option.missing for option in blocked([seat("rollout-0"), seat("rollout-1")], anything)]
    assert not [text for text in can if "TP" in text or "trains" in text]


def test_kinds_and_limits_of_a_change():
    now, joined, one, _ = arrangements([seat("a"), seat("b"), seat("c", may_change=False)], anything)
    assert kinds_of_change(now, now) == ()
    assert kinds_of_change(now, joined) == (REBUCKET,)
    assert kinds_of_change(now, one) == (ROLES,)
    assert kinds_of_change(now, now.limited({1: 2})) == (SLOTS,)
    assert kinds_of_change(joined, one.limited({1: 2})) == (ROLES, REBUCKET, SLOTS)
    assert limits_for(now, now.limited({1: 2})) == {name: {"tp": 1, "slots": 2} for name in ("a", "b", "c")}
    assert limits_for(now, joined.limited({2: 3})) == {"a": {"tp": 2, "slots": 3}}
    assert limits_for(now, now) == {}


def carry_out(roles, assignments):
    """A change, as the scheduler's state machine sees it; refused: an error."""
    wanted = {name: Assignment(ROLE[str(has["role"])], int(str(has["tp"]))) for name, has in assignments.items()}
    commands = roles.request(wanted)
    assert not [command for command in commands if isinstance(command, Refuse)], commands
    while roles.changes:
        (generation, change), *_ = roles.changes.items()
        for name in change.moves:
            roles.handle(RoleStage(name, generation, str(change.stage), 0.0))


@given(st.lists(st.integers(0, 100), min_size=1, max_size=6))
def test_the_steps_lead_there_by_changes_that_the_scheduler_takes(choices):
    roles = Roles()
    for name in NAMES:
        roles.announce(name, Assignment(Role.ROLLOUT, 1), "node")
    for choice in choices:
        rows = {row["worker"]: row for row in roles.rows()}
        seats = [
            seat(name, role=row["role"], bond=frozenset(row["shares_with"]), residents=choice * (1 + k) % 5)
            for k, (name, row) in enumerate(sorted(rows.items()))
        ]
        seats.append(seat("stays", may_change=False))
        options = arrangements(seats, anything)
        wanted = options[choice % len(options)]
        for step in steps_to(arranged(seats), wanted, dict.fromkeys(NAMES, 1)):
            assert all(not (x.keys() & y.keys()) for x, y in itertools.combinations(step, 2))
            for assignments in step:
                carry_out(roles, assignments)
        has = {row["worker"]: (row["role"], row["tp"]) for row in roles.rows()}
        leads = {engine.workers[0]: engine.tp for engine in wanted.engines if engine.workers[0] in NAMES}
        assert {name for name, (role, _) in has.items() if role == "train"} == set(wanted.training)
        assert {name: tp for name, (role, tp) in has.items() if role == "rollout"} == leads
