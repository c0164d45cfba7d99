"""What is packed comes back, and nothing else does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from libra.errors import StoreError
from libra.store.record_codec import pack, unpack
from libra.types import Phase

_PLAIN = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
)
_VALUES = st.recursive(_PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)
_ARRAYS = hnp.arrays(
    st.sampled_from([np.int32, np.int64, np.float32, np.float64, np.bool_]), hnp.array_shapes(min_dims=0, min_side=0)
)


@given(st.dictionaries(st.text(), _VALUES))
def test_plain_values_come_back(record):
    assert unpack(pack(record, source="here"), source="here") == record


@given(_ARRAYS)
def test_arrays_come_back_with_dtype_shape_and_bytes(array):
    got = unpack(pack({"deep": [{"array": array}]}, source="here"), source="here")["deep"][0]["array"]
    assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert got.flags.writeable


def test_text_that_is_no_unicode_and_another_schema():
    for text in ("file \udcff", "é \ufffd 𝄞"):
        record = {"texts": [text], text: np.arange(3, dtype=np.int32), "kept": b"\xff", "deep": {"number": 2**63}}
        got = unpack(pack(record, source="here"), source="here")
        assert got.pop(text).tolist() == [0, 1, 2]
        assert got == {"texts": [text], "kept": b"\xff", "deep": {"number": 2**63}}
    packed = bytearray(pack({}, source="here"))
    packed[4] = 9
    with pytest.raises(StoreError, match="schema 9"):
        unpack(bytes(packed), source="here")


def test_numpy_scalars_and_string_enums_come_back_as_plain_values():
    got = unpack(pack({"n": np.int64(3), "x": np.float32(0.5), "phase": Phase.TOOL}, source="here"), source="here")
    assert got == {"n": 3, "x": 0.5, "phase": "TOOL"}
    assert [type(value) for value in got.values()] == [int, float, str]


@given(st.data())
def test_bytes_that_were_cut_extended_or_changed_are_refused(data):
    packed = pack({"token_ids": np.arange(7, dtype=np.int32), "text": "abc"}, source="here")
    cut = data.draw(st.integers(0, len(packed) - 1))
    for torn in (packed[:cut], packed + b"x"):
        with pytest.raises(StoreError, match="somewhere"):
            unpack(torn, source="somewhere")
    position = data.draw(st.integers(0, len(packed) - 1).filter(lambda i: i not in (6, 7)))  # 6 and 7 are reserved
    changed = bytearray(packed)
    changed[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(StoreError, match="somewhere"):
        unpack(bytes(changed), source="somewhere")


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()]), 2**70])
def test_a_value_that_cannot_be_stored_is_named_with_its_place(value):
    with pytest.raises(StoreError, match="journal/x: cannot store"):
        pack({"value": value}, source="journal/x")
