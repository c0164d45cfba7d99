"""Fits find what made the data; tables answer with what was measured."""

from dataclasses import replace

import numpy as np
import pytest

from libra.errors import ConfigError
from libra.hardware import Efficiencies, engine_seconds, load_shape
from libra.hardware.fit_rooflines import fit_attention, fit_linear
from libra.hardware.least_squares import fit_positive
from libra.hardware.operators import operator_s
from libra.hardware.profiles import CollectiveProfile
from libra.hardware.shipped import read_tables, save_tables, shipped_tables
from libra.hardware.tables import make_tables


def test_a_fit_finds_constants_despite_outliers():
    x = np.linspace(1.0, 10.0, 50)
    measured = 3.0 + 0.5 * x
    measured[::10] *= 4.0
    found = fit_positive(lambda c: np.log((c[0] + c[1] * x) / measured), np.array([1.0, 1.0]))
    assert found == pytest.approx([3.0, 0.5], rel=0.03)


def test_forms_are_recovered_from_their_own_seconds(gpu, linear_profile, attention_profile):
    truth = Efficiencies(gemm_flops_frac=0.6, gemm_small_frac=0.5, gemm_bytes_frac=0.7, move_norm=9.0)
    found = fit_linear([(gpu, linear_profile(truth))])
    assert found.gemm_flops_frac == pytest.approx(0.6, rel=0.05)
    assert found.gemm_bytes_frac == pytest.approx(0.7, rel=0.05)
    assert found.move_norm == pytest.approx(9.0, rel=0.1)
    assert found.decode_bytes_frac == Efficiencies().decode_bytes_frac  # nothing here speaks of it
    start = Efficiencies(decode_bytes_frac=0.5, prefill_flops_frac=0.3)
    attention = fit_attention([(gpu, attention_profile())], start)
    assert attention.decode_bytes_frac == pytest.approx(Efficiencies().decode_bytes_frac, rel=0.05)
    assert attention.prefill_flops_frac == pytest.approx(Efficiencies().prefill_flops_frac, rel=0.05)


def test_no_fraction_ends_above_one(gpu, linear_profile):
    found = fit_linear([(gpu, linear_profile(factor=0.5))])
    assert max(found.gemm_flops_frac, found.gemm_small_frac, found.gemm_bytes_frac) <= 1.0


def test_a_table_answers_with_the_measurement_and_only_near_it(gpu, shape, linear_profile):
    eff, profile = Efficiencies(), linear_profile(factor=1.3, tps=(1,))
    own = make_tables(gpu, eff, [profile]).of(shape)
    for curve in profile.curves:
        found = operator_s(gpu, eff, shape, 1, curve.operator, curve.tokens, own)
        assert found == pytest.approx(curve.seconds, rel=1e-9)
        between = np.sqrt(curve.tokens[:-1] * curve.tokens[1:])
        form = operator_s(gpu, eff, shape, 1, curve.operator, between)
        assert operator_s(gpu, eff, shape, 1, curve.operator, between, own) == pytest.approx(1.3 * form)
    tokens = np.array([64.0])
    near = make_tables(gpu, eff, [profile]).of(replace(shape, ffn=12_000)).ratio("mlp_up_proj", 1, tokens)
    far = make_tables(gpu, eff, [profile]).of(replace(shape, ffn=400_000)).ratio("mlp_up_proj", 1, tokens)
    assert 1.15 < float(near[0]) < 1.3
    assert float(far[0]) == 1.0


def test_attention_tables_are_for_their_heads_only(gpu, shape, attention_profile):
    profile = attention_profile(factor=1.5)
    tables = make_tables(gpu, Efficiencies(), [profile])
    num, context = profile.decode[:, 0], profile.decode[:, 1]
    assert tables.of(shape).decode_ratio(num, context, 1) == pytest.approx(1.5)
    assert tables.of(shape).prefill_ratio(profile.prefill[:, 0], profile.prefill[:, 1], 1) == pytest.approx(1.5)
    assert tables.of(shape).decode_ratio(num, context, 2) == pytest.approx(1.0)
    assert tables.of(load_shape("Qwen3-14B")).decode_ratio(num, context, 1) == pytest.approx(1.0)


def test_an_all_reduce_beyond_its_table_keeps_its_rate(gpu, shape):
    sizes = np.array([1e3, 1e6, 1e8])
    profile = CollectiveProfile("n.csv", gpu.name, "all_reduce", 4, 4, sizes, np.array([2e-5, 4e-5, 1e-3]))
    own = make_tables(gpu, Efficiencies(), [profile]).of(shape)
    found = own.all_reduce_s(np.array([1.0, 1e6, 4e8]), 4, 4)
    assert found == pytest.approx([2e-5, 4e-5, 4e-3])
    assert own.all_reduce_s(sizes, 8, 8) is None


def test_saved_tables_say_the_same_and_measured_gpus_ship(tmp_path, gpu, shape, linear_profile, attention_profile):
    tables = make_tables(gpu, Efficiencies(), [linear_profile(factor=1.2), attention_profile(factor=1.1)])
    save_tables(tables, tmp_path / "t.json", source="made")
    again = read_tables(tmp_path / "t.json")
    kept = engine_seconds(gpu, shape, 2, tables=tables).decode_step_s(8, 8192)
    assert engine_seconds(gpu, shape, 2, tables=again).decode_step_s(8, 8192) == pytest.approx(kept, rel=2e-3)
    assert engine_seconds(gpu, shape, 2, tables=None).decode_step_s(8, 8192) < 0.95 * kept
    (tmp_path / "bad.json").write_text("[]")
    shipped = shipped_tables("A800-80G")
    assert shipped is not None and shipped.linear and shipped_tables("A40-48G") is None
    with pytest.raises(ConfigError):
        read_tables(tmp_path / "bad.json")
