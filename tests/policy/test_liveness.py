"""The invariants of `libra.policy.liveness`, after any order of events."""

from hypothesis import given
from hypothesis import strategies as st

from libra.policy.liveness import REMIND_S, RESTART_AFTER_S, START_S, TELL_AFTER_S, Backoff, Liveness, MissingRoles
from libra.policy.liveness import RolesBack as Back
from libra.policy.liveness import RolesMissing as Missing
from libra.policy.liveness import RoleSupply as Has

RUNS, NAMES = ("a", "b"), ("x", "y")
EVENTS = ("join", "leave", "ready", "fail", "end", "sleep", "wake", "check fails", "check passes", "wait")


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from(RUNS), st.sampled_from(NAMES)), max_size=60))
def test_no_worker_works_before_it_is_ready_and_a_failed_one_is_restarted_as_often_as_the_back_off_says(events):
    liveness, at, held, left_s = Liveness(), {}, set(), {}
    stage, silent, due_s, failures = {}, {}, {}, {}  # by run and address; failures by run and name
    for number, (event, run, name) in enumerate(events):
        t_s, address = 20.0 * number, at.get(name)
        key, supplied = (run, address), None
        if event == "join" and address is None:
            address = at[name] = f"{name}{number}"
            left_s.pop(name, None)
            stage |= {(each, address): "setting_up" for each in RUNS}
            assert liveness.joined(address, name, RUNS, t_s)
            held.add(address)
        elif event == "end":
            supplied = liveness.ended(run)
            for kept in (stage, silent, due_s, failures):
                [kept.pop(key) for key in list(kept) if key[0] == run]
        elif address is None:
            continue
        elif event == "leave":
            liveness.left(at.pop(name), t_s)
            left_s[name] = t_s
            held.discard(address)
            for kept in (stage, silent, due_s):
                [kept.pop(key) for key in list(kept) if key[1] == address]
        elif event == "ready":
            [kept.pop(key, None) for kept in (stage, due_s)], failures.pop((run, name), None)
            supplied = liveness.ready(run, address)
        elif event == "fail" and key in stage:
            stage[key], failures[run, name] = "failed", failures.get((run, name), 0) + 1
            after_s = [*RESTART_AFTER_S, *[None] * 60][failures[run, name] - 1]
            assert liveness.failed(run, address, "OSError", t_s, nanny=True) == after_s
            due_s[key] = float("inf") if after_s is None else t_s + after_s
        elif event in ("sleep", "wake"):
            liveness.slept(run, address, asleep=event == "sleep")
            silent[key] = silent.get(key, set()) - {"asleep"} | ({"asleep"} if event == "sleep" else set())
        elif event.startswith("check"):
            liveness.checked(run, address, passed=event == "check passes")
            silent[key] = silent.get(key, set()) - {"out"} | ({"out"} if event == "check fails" else set())
        if supplied is not None:
            assert sorted(supplied) == sorted(held - {address for _, address in stage})
            held -= set(supplied)
        for each in RUNS:
            now = {key for key, at_s in due_s.items() if key[0] == each and t_s >= at_s}
            assert {(each, restart.address) for restart in liveness.due(each, t_s)} == now
            due_s = {key: at_s for key, at_s in due_s.items() if key not in now}
            rows = {(each, row["address"]): row["stage"] for row in liveness.rows(each, t_s)}
            assert rows == {key: value for key, value in stage.items() if key[0] == each}
        assert liveness.joining() == {address for _, address in stage}
        assert liveness.silent() == {address for (_, address), why in silent.items() if why}
        assert liveness.lost(t_s, 60.0) == sorted(each for each, lost_s in left_s.items() if t_s - lost_s < 60.0)


def test_a_back_off_ends_or_goes_on_with_its_last_delay():
    backoff = Backoff()
    assert [backoff.failed("x", (0.0, 5.0)) for _ in range(3)] == [0.0, 5.0, None]
    assert backoff.failed("x", (0.0, 5.0), forever=True) == 5.0
    backoff.worked("x")
    assert backoff.failed("x", (0.0, 5.0)) == 0.0


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.sampled_from(["", "cause"])), max_size=80))
def test_a_missing_role_is_reported_in_time_and_back_once(steps):
    roles, missing_s, told_s, had, cause = MissingRoles(["ROLLOUT"]), None, None, False, ""
    for number, (there, coming, why) in enumerate(steps):
        t_s = number * 40.0
        found = roles.look(t_s, {"ROLLOUT": Has(1, ("x",) if there else (), (why,), coming)})
        if there:
            expected = [] if told_s is None else [Back(("ROLLOUT",), t_s - missing_s, ("x",), had)]
            missing_s, told_s, had = None, None, True
        else:
            missing_s = t_s if missing_s is None else missing_s
            after_s = START_S if coming and not had else TELL_AFTER_S
            due = t_s - missing_s >= after_s if told_s is None else why != cause or t_s - told_s >= REMIND_S
            expected = [Missing(("ROLLOUT",), t_s - missing_s, frozenset(["x"] if had else []), False)] if due else []
            told_s, cause = (t_s, why) if due else (told_s, cause)
        assert list(found) == expected and roles.told == ([] if told_s is None else ["ROLLOUT"])
