"""Records of waves: once, in order, whole or refused."""

import pytest

from libra.errors import RecordExists, StoreError
from libra.store.run_records import WAVES, commit_wave, groups_of, in_waves, read_waves


def rows(*groups):
    return [{"iteration": 3, "group": g, "path": f"{g}.group", "advantages": [0.5, -0.5]} for g in groups]


def test_the_waves_of_a_batch_come_back_in_order_and_end_at_a_gap(tmp_path):
    for wave, groups in ((0, (2,)), (1, (0, 3)), (3, (1,))):
        commit_wave(tmp_path, 3, wave, rows(*groups))
    commit_wave(tmp_path, 4, 0, rows(9))
    found = read_waves(tmp_path, 3)
    assert [groups_of(wave) for wave in found] == [((3, 2),), ((3, 0), (3, 3))]
    assert found[1][0]["advantages"] == [0.5, -0.5]
    batch = [row for wave in found for row in wave]
    assert in_waves(batch) == found and in_waves(rows(0, 1)) == []
    assert read_waves(tmp_path, 7) == read_waves(tmp_path / "none", 3) == []


def test_a_second_writer_gets_the_first_ones_wave_and_an_altered_one_is_refused(tmp_path):
    commit_wave(tmp_path, 3, 0, rows(2))
    with pytest.raises(RecordExists):
        commit_wave(tmp_path, 3, 0, rows(1))
    path = WAVES.path(tmp_path, 3, 0)
    text = path.read_text()
    path.write_text(text.replace("0.5", "0.6"))
    with pytest.raises(StoreError, match="type libra repair"):
        read_waves(tmp_path, 3)
    path.write_text(text)
    path.rename(WAVES.path(tmp_path, 3, 1))
    commit_wave(tmp_path, 3, 0, rows(2))
    with pytest.raises(StoreError, match="it is of another wave"):
        read_waves(tmp_path, 3)
