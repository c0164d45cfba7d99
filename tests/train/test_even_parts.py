from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.train.even_parts import Items, even_parts
from libra.train.expert_balance import loads_of
from libra.train.row_packing import fill_rows

EXPERTS, LAYERS, TOP_K = 4, 2, 2


def items_of(sizes, prompts, prompt_tokens, seed):
    rng = np.random.default_rng(seed)

    def loads(tokens):
        return loads_of([rng.integers(0, EXPERTS, (each, LAYERS, TOP_K)).astype(np.int16) for each in tokens], EXPERTS)

    count = max(prompts) + 1
    return Items(
        loads(sizes), np.array(sizes), np.array(prompts), loads([prompt_tokens] * count),
        np.full(count, prompt_tokens), LAYERS, TOP_K,
    )  # fmt: skip


def cost_of(items, parts):
    """The cost and the sizes of parts, from the definition."""
    total, tokens = 0.0, []
    for part in parts:
        prompts = sorted({int(items.prompt_S[index]) for index in part})
        loads = items.loads_SD[part].sum(0) + items.prompt_loads_GD[prompts].sum(0)
        tokens.append(int(items.sizes_S[part].sum() + items.prompt_sizes_G[prompts].sum()))
        total += loads.reshape(LAYERS, EXPERTS).max(1).mean() * EXPERTS / TOP_K + tokens[-1]
    return total, tokens


SHAPES = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 4)), min_size=1, max_size=16)


@given(shapes=SHAPES, prompt_tokens=st.integers(0, 20), room=st.integers(50, 120), seed=st.integers(0, 5))
def test_every_item_once_in_parts_that_fit_and_cost_no_more(shapes, prompt_tokens, room, seed):
    items = items_of([size for size, _ in shapes], [prompt for _, prompt in shapes], prompt_tokens, seed)
    start = fill_rows([size + prompt_tokens for size, _ in shapes], room)
    parts, cost = even_parts(items, start, room, lambda part: len(part) < 6 or part in map(sorted, start))
    before, after = cost_of(items, start), cost_of(items, parts)
    assert sorted(index for part in parts for index in part) == list(range(len(shapes))) and all(parts)
    assert max(after[1]) <= room
    assert all(len(part) < 6 or part in map(sorted, start) for part in parts)
    assert after[0] <= before[0] + 1e-6 and cost == pytest.approx(after[0])
    assert even_parts(items, start, room, lambda part: len(part) < 6 or part in map(sorted, start)) == (parts, cost)


def test_parts_are_evener_unless_no_loads_may_be_looked_at():
    gained = 0.0
    for seed in range(6):
        items = items_of([4, 6, 5, 9, 7, 3], [0, 0, 1, 1, 2, 2], 4, seed)
        start = [[0, 2], [1, 4], [3, 5]]
        assert even_parts(items, start, 24, lambda _: True, 0)[0] == start
        best = cost_of(items, start)[0]
        for places in product(range(3), repeat=6):
            parts = [part for number in range(3) if (part := [i for i in range(6) if places[i] == number])]
            cost, sizes = cost_of(items, parts)
            best = min(best, cost) if max(sizes) <= 24 else best
        before, cost = cost_of(items, start)[0], even_parts(items, start, 24, lambda _: True)[1]
        assert cost >= best - 1e-6
        gained += before - cost - 0.75 * (before - best)
    assert gained > 0
