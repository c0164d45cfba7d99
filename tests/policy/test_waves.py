"""Waves of a streamed step, and which complete groups its batch may take."""

from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from libra.facts import OpenWave
from libra.policy import Waves
from libra.policy.waves import first_come


def test_a_wave_takes_all_that_is_complete_and_the_last_is_small():
    """Eight groups in four waves at most: two of them, then what came meanwhile, then one by one."""
    waves, wave = Waves(4), 0
    for number in range(4):
        assert waves.parked(0, number) is None
    sizes = []
    for complete in ((0,), (0, 1), (2, 3, 4, 5), (6,), (7,)):
        opened = waves.next(0, 8, [(0, g) for g in complete])
        sizes.append(0 if opened is None else len(opened.members))
        if opened is not None:
            assert waves.next(0, 8, [(0, 7)]) is None, "the trainer is busy"
            waves.trained(0, wave)
            wave += 1
    assert sizes == [0, 2, 4, 1, 1]


def test_where_engines_turn_a_wave_takes_only_some_of_what_is_complete():
    ready = [(0, g) for g in range(16)]
    for most, taken in ((8, 3), (2, 8)):  # two waves must be enough
        waves = Waves(most, 1, 3)
        waves.parked(0, 0)
        opened = waves.next(0, 16, ready)
        assert isinstance(opened, OpenWave) and opened.members == tuple(ready[:taken])


def meets(batch, places, groups, left):
    """Whether groups with these deadlines fit into ``places`` of this batch and all later ones, by trying the nearest first."""
    for deadline in sorted(left):
        if not places:
            batch, places = batch + 1, groups
        if deadline < batch:
            return False
        places -= 1
    return True


@given(
    st.integers(1, 3), st.integers(1, 4), st.lists(st.integers(0, 3), max_size=7), st.lists(st.integers(0, 3), max_size=4)
)  # fmt: skip
def test_what_is_taken_first_come_leaves_the_others_their_places_and_no_choice_takes_more(
    eta, groups, complete, in_flight
):
    """Against every choice, where the deadlines can be met at all."""
    batch, places = 5, groups
    deadlines = {(4, number): batch + min(later, eta) for number, later in enumerate(complete)}
    flying = [batch + min(later, eta) for later in in_flight]
    if not meets(batch, places, groups, [*deadlines.values(), *flying]):
        return
    found = first_come(batch, places, groups, eta, deadlines, flying)

    def fits(choice):
        left = [deadline for group, deadline in deadlines.items() if group not in choice]
        return meets(batch, places - len(choice), groups, [*left, *flying])

    assert len(set(found)) == len(found) <= places and fits(tuple(found))
    assert [deadlines[group] for group in found] == sorted(deadlines.values())[: len(found)]
    choices = chain.from_iterable(combinations(deadlines, number) for number in range(places + 1))
    assert len(found) == max(len(choice) for choice in choices if fits(choice))
