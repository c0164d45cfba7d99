"""Large observations: written once by digest, read back verified, bounded, and never outside the run directory."""

import pytest

from libra.errors import StoreError
from libra.store.observations import (
    MOST_BYTES,
    REFERENCE_BYTES,
    keep_observation,
    observation,
    observations_of,
    read_observation,
)
from libra.types import ToolReturn, ToolStatus

WHERE = ("train-0-0-1", 0, 2, 0)


def test_what_is_large_comes_back_whole_and_twice_written_is_once_there(tmp_path):
    assert keep_observation(tmp_path, *WHERE, "x" * REFERENCE_BYTES) == ""
    assert keep_observation(tmp_path, *WHERE, "∙" * (REFERENCE_BYTES // 3)) == ""
    assert keep_observation(tmp_path / "bytes count", *WHERE, "∙" * (REFERENCE_BYTES // 3 + 1)) != ""
    text = "\ud800 " + "y" * (REFERENCE_BYTES + 1)  # a lone surrogate too
    reference = keep_observation(tmp_path, *WHERE, text)
    assert keep_observation(tmp_path, *WHERE, text) == reference
    assert read_observation(tmp_path, reference) == text
    (found,) = observations_of(tmp_path, "train-0-0-1")
    assert (found.reference, found.turn, found.call, found.sound) == (reference, 2, 0, True)
    given = ToolReturn("t", ToolStatus.OK, "short", reference=reference)
    assert observation(given, run=tmp_path) == text and observation(ToolReturn("t", ToolStatus.OK, "all")) == "all"
    with pytest.raises(StoreError):
        observation(given)


def test_too_much_is_not_kept_and_said(tmp_path, caplog):
    assert keep_observation(tmp_path, *WHERE, "z" * (MOST_BYTES + 1)) == ""
    assert "are not kept" in caplog.text and not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", [0, 10, REFERENCE_BYTES])
def test_damage_is_an_error_that_names_the_file(tmp_path, cut):
    reference = keep_observation(tmp_path, *WHERE, "y" * (REFERENCE_BYTES + 1))
    path = tmp_path / reference
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(StoreError, match="train-0-0-1/0-2-0-"):
        read_observation(tmp_path, reference)
    assert [each.sound for each in observations_of(tmp_path, "train-0-0-1")] == [False]
    path.unlink()
    with pytest.raises(StoreError):
        read_observation(tmp_path, reference)


@pytest.mark.parametrize(
    "reference", ["", "../secret", "/etc/passwd", "observations/../../x/0-0-0-" + "a" * 64 + ".txt"]
)
def test_only_references_of_ours_are_read(tmp_path, reference):
    with pytest.raises(StoreError):
        read_observation(tmp_path, reference)
