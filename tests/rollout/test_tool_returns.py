import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.rollout import load_chat_format
from libra.rollout.tool_returns import fitted


@pytest.fixture(scope="module")
def chat(random_model):
    return load_chat_format(random_model)


def test_short_returns_stay_whole_beside_a_long_one(chat):
    shown, ids = fitted(chat, ["a" * 2000, "short", "b" * 1000], 500, 64, ended=True)
    assert shown[1] == "short" and "a" * 50 in shown[0]
    assert shown[0].endswith(" of 2,000 tokens kept]")
    assert shown[2].endswith(" of 1,000 tokens kept]")
    assert len(ids) <= 500 - 64
    assert fitted(chat, ["12", "34"], 1000, 64, ended=True)[0] == ["12", "34"]


def test_where_nothing_fits_the_context_is_full_without_the_tool(chat):
    shown, ids = fitted(chat, ["a" * 100], 20, 64, ended=True)
    assert shown == ["[cut: 0 of 100 tokens kept]"]
    assert len(ids) > 20


@given(lengths=st.lists(st.integers(0, 400), min_size=1, max_size=4), left=st.integers(300, 900), ended=st.booleans())
def test_what_is_shown_leaves_room_for_an_answer(chat, lengths, left, ended):
    shown, ids = fitted(chat, ["é" * length for length in lengths], left, 32, ended=ended)
    assert len(ids) <= left - 32
    assert ids.tolist() == chat.observation_ids(shown, ended=ended).tolist()
