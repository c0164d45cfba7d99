import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.dispatch import Block, plan
from libra.dispatch.batch_layout import replan
from libra.errors import LayoutError

WORKERS = ("a", "b", "c", "d")


def content(row, size):
    return bytes((31 * row + i) % 251 for i in range(size))


@st.composite
def batches(draw):
    """Blocks (rows with one holder or more, in any order) and what some workers want of them."""
    sizes = draw(st.dictionaries(st.integers(0, 40), st.integers(0, 9), min_size=1, max_size=16))
    holders = {row: draw(st.sets(st.sampled_from(WORKERS), min_size=1)) for row in sizes}
    blocks = []
    for worker in WORKERS:
        rows = draw(st.permutations([row for row in sizes if worker in holders[row]]))
        cut = draw(st.integers(0, len(rows)))
        for name, part in (("x", rows[:cut]), ("y", rows[cut:])):
            blocks.append(Block(worker, name, tuple(part), tuple(sizes[row] for row in part)))
    consumers = draw(st.sets(st.sampled_from((*WORKERS, "e")), min_size=1))
    wanted = {name: draw(st.permutations(sorted(draw(st.sets(st.sampled_from(sorted(sizes))))))) for name in consumers}
    return blocks, wanted, sizes


def carry_out(moves, blocks, buffer, filled):
    memory = {(block.worker, block.name): b"".join(map(content, block.rows, block.num_bytes)) for block in blocks}
    for move in moves:
        for piece in move.pieces:
            run = memory[move.source, piece.block][piece.offset_bytes : piece.offset_bytes + piece.num_bytes]
            assert len(run) == piece.num_bytes > 0
            buffer[piece.at_bytes : piece.at_bytes + piece.num_bytes] = run
            for at in range(piece.at_bytes, piece.at_bytes + piece.num_bytes):
                filled[at] += 1


@given(batches())
def test_each_wanted_row_arrives_once_and_local_ones_do_not_travel(batch):
    blocks, wanted, sizes = batch
    made = plan(blocks, wanted)
    held = {worker: {row for block in blocks if block.worker == worker for row in block.rows} for worker in WORKERS}
    for consumer, rows in wanted.items():
        expected = b"".join(content(row, sizes[row]) for row in rows)
        buffer, filled = bytearray(made.buffer_bytes[consumer]), [0] * len(expected)
        carry_out(made.to(consumer), blocks, buffer, filled)
        assert bytes(buffer) == expected
        assert set(filled) <= {1}
        travels = sum(move.num_bytes for move in made.to(consumer) if move.source != consumer)
        assert travels == sum(sizes[row] for row in rows if row not in held.get(consumer, ()))
        assert len({move.source for move in made.to(consumer)}) == len(made.to(consumer))
    assert plan(blocks, wanted) == made


@given(batches(), st.sets(st.sampled_from(WORKERS), min_size=1))
def test_what_failed_comes_from_the_others_or_the_gap_is_named(batch, lost):
    blocks, wanted, sizes = batch
    made = plan(blocks, wanted)
    for consumer, rows in wanted.items():
        failed = [move for move in made.to(consumer) if move.source in lost]
        kept = tuple(move for move in made.to(consumer) if move.source not in lost)
        buffer, filled = bytearray(made.buffer_bytes[consumer]), [0] * made.buffer_bytes[consumer]
        carry_out(kept, blocks, buffer, filled)
        starts = [sum(sizes[row] for row in rows[:index]) for index in range(len(rows))]
        missing = [row for row, begin in zip(rows, starts, strict=True) if sizes[row] and not filled[begin]]
        left = {row for block in blocks if block.worker not in lost for row in block.rows}
        if set(missing) <= left:
            carry_out(replan(blocks, consumer, rows, failed, lost), blocks, buffer, filled)
            assert bytes(buffer) == b"".join(content(row, sizes[row]) for row in rows)
            assert set(filled) <= {1}
        else:
            with pytest.raises(LayoutError, match=r"^[a-e]: only "):
                replan(blocks, consumer, rows, failed, lost)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 3))
def test_senders_of_copies_are_balanced(row_bytes, num_consumers):
    rows = tuple(range(len(row_bytes)))
    blocks = [Block(worker, "x", rows, tuple(row_bytes)) for worker in WORKERS]
    made = plan(blocks, {f"consumer-{i}": rows for i in range(num_consumers)})
    loads = [sum(move.num_bytes for move in made.moves if move.source == worker) for worker in WORKERS]
    assert max(loads) - min(loads) <= max(row_bytes)


def test_rows_that_lie_together_at_both_ends_are_one_piece():
    blocks = [Block("a", "x", (0, 1, 2, 3), (5, 5, 5, 5)), Block("b", "x", (4, 5), (5, 5))]
    made = plan(blocks, {"c": (0, 1, 2, 3, 4, 5), "d": (1, 0)})
    assert [len(move.pieces) for move in made.to("c")] == [1, 1]
    assert [len(move.pieces) for move in made.to("d")] == [2]
    each = plan([Block(worker, "x", (worker,), (1,)) for worker in WORKERS], dict.fromkeys(WORKERS, WORKERS))
    assert [each.to(worker)[0].source for worker in WORKERS] == ["b", "c", "d", "a"]  # not all the same one first


@given(st.lists(st.integers(0, 3), max_size=8))
def test_a_block_is_sent_whole_and_equal_sizes_take_no_room(sizes):
    for block in (Block("a", "x", range(len(sizes)), tuple(sizes)), Block("a", "x", range(2000), (32768,) * 2000)):
        sent = pickle.dumps(block)
        assert pickle.loads(sent) == block
    assert len(sent) < 200


def test_blocks_and_layouts_that_contradict_themselves_are_refused():
    one = Block("a", "x", (1,), (3,))
    for more, wanted in (
        ([], [2]), ([], [1, 1]), ([Block("b", "x", (1,), (4,))], [1]), ([Block("a", "x", (2,), (4,))], [1])
    ):  # fmt: skip
        with pytest.raises(LayoutError):
            plan([one, *more], {"c": wanted})
    for rows, sizes in (((1, 1), (2, 2)), ((1,), (2, 2)), ((1,), (-1,))):
        with pytest.raises(LayoutError):
            Block("a", "x", rows, sizes)
