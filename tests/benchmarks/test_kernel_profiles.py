"""Kernel profiles: read, refused where they cannot be one, fitted, and made tables of."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.kernel_profiles import (
    AttentionProfile,
    CollectiveProfile,
    Curve,
    LinearProfile,
    TrainingProfile,
    gpu_in_path,
    read_directory,
    read_profiles,
)
from benchmarks.kernel_tables import audit, calibrate, fit_attention, fit_linear, make_tables, save_tables
from libra.errors import ConfigError
from libra.hardware import Efficiencies, engine_seconds, load_gpu, load_shape
from libra.hardware.layer_seconds import GEMMS, MOVES, attention_decode_s, attention_prefill_s, operator_s
from libra.hardware.tables import read_tables, shipped_tables

MLP = """time_stats.mlp_up_proj.median,time_stats.mlp_up_proj.std,n_head,n_kv_head,n_embd,n_expanded_embd,vocab_size,num_tokens,\
num_tensor_parallel_workers
0.4,0,32,8,4096,14336,128256,16,1
0.6,0,32,8,4096,14336,128256,16,1
0.1,0,32,8,4096,14336,128256,1,1
0.2,0,32,8,4096,14336,128256,16,2
"""


@pytest.fixture
def gpu():
    return load_gpu("A100-80G")


@pytest.fixture
def shape():
    return load_shape("Llama-2-7b")


@pytest.fixture
def linear_profile(gpu, shape):
    """A profile whose seconds are the forms' with ``eff``, times ``factor``."""

    def make(eff=None, *, factor=1.0, tps=(1, 2)):
        eff = eff or Efficiencies()
        tokens = np.unique(np.geomspace(1, 4096, 40).astype(int)).astype(float)
        curves = tuple(
            Curve(operator, tp, tokens, factor * operator_s(gpu, eff, shape, tp, operator, tokens))
            for tp in tps
            for operator in GEMMS + MOVES
        )
        return LinearProfile("compute_a100_made_mlp.csv", gpu.name, shape, curves)

    return make


@pytest.fixture
def attention_profile(gpu, shape):
    """Likewise for attention, with ``on`` the GPU whose forms are used."""

    def make(on=None, *, factor=1.0):
        sheet, eff = on or gpu, Efficiencies()
        num, context = (grid.ravel() for grid in np.meshgrid([1.0, 4.0, 16.0, 64.0], np.arange(256.0, 4096.0, 128.0)))
        decode = factor * attention_decode_s(sheet, eff, num, num * context, 4.0 * 32 * 128)
        new, past = (grid.ravel() for grid in np.meshgrid(np.arange(128.0, 1024.0, 64.0), [0.0, 512.0, 1024.0]))
        prefill = factor * attention_prefill_s(sheet, eff, new, past, 32.0, 128)
        return AttentionProfile(
            source="made_attention.csv", gpu=gpu.name, shape=shape, tp=1, heads=32.0, kv_heads=32.0, head_dim=128,
            decode=np.column_stack([num, context, decode]), prefill=np.column_stack([new, past, prefill]), uneven=0,
        )  # fmt: skip

    return make


def test_the_gpu_stands_in_the_path():
    paths = {
        "compute_a100_meta-llama_Llama-2-7b-hf_mlp.csv": "A100-80G", "compute/a40/a4000-notes/mlp.csv": "A40-48G",
        "A100-40": "A100-40G", "profiles_of_the_a800/run-h100/x.csv": "H100-80G", "data100/mlp.csv": None,
    }  # fmt: skip
    assert {path: gpu_in_path(path) for path in paths} == paths


def test_repeated_points_are_averaged_and_milliseconds_become_seconds(tmp_path):
    (tmp_path / "any_name.csv").write_text(MLP)
    (profile,) = read_profiles(tmp_path / "any_name.csv")
    assert isinstance(profile, LinearProfile)
    assert (profile.gpu, profile.shape.num_kv_heads, profile.shape.ffn) == (None, 8, 14336)
    one, two = profile.curves
    assert one.tokens.tolist() == [1.0, 16.0]
    assert one.seconds == pytest.approx([1e-4, 5e-4])
    assert (two.tp, two.seconds.tolist()) == (2, [2e-4])


def test_what_is_no_profile_is_passed_over(tmp_path):
    (tmp_path / "a.csv").write_text("when,what\n1,2\n")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "b.json").write_text('{"model": {"layers": 3}}')
    assert read_directory(tmp_path) == []
    (tmp_path / "c.csv").write_text(MLP.replace("0.4,0", "fast,0"))
    with pytest.raises(ConfigError, match="'fast'"):
        read_directory(tmp_path)
    with pytest.raises(ConfigError):
        read_directory(tmp_path / "nowhere")


def test_attention_of_unequal_sequences_is_left_out(tmp_path):
    head = "time_stats.attn_prefill.median,time_stats.attn_decode.median,n_embd,n_q_head,n_kv_head,num_tensor_parallel_workers,"
    head += "batch_size,prefill_chunk_size,kv_cache_size,is_prefill,seq_len_cv\n"
    rows = ["0,0.5,4096,32,32,1,8,0,1024,False,0.0", "0,0.9,4096,32,32,1,8,0,1024,False,0.4"]
    rows += ["0.25,0,4096,32,32,1,1,512,64,True,0.0"]
    (tmp_path / "attention.csv").write_text(head + "\n".join(rows) + "\n")
    (profile,) = read_profiles(tmp_path / "attention.csv")
    assert isinstance(profile, AttentionProfile)
    assert profile.decode.tolist() == [[8.0, 1024.0, 5e-4]]
    assert profile.prefill.tolist() == [[512.0, 64.0, 2.5e-4]]
    assert profile.uneven == 1


def test_training_layers_are_read_per_model_and_gpu(tmp_path):
    layers = {str(i): [0.01, 0.02, 0.003] for i in range(11)}
    (tmp_path / "t.json").write_text(json.dumps({"M": {"A100-80": {"1": {"2": layers}, "4": {"1": layers}}}}))
    (profile,) = read_profiles(tmp_path / "t.json")
    assert isinstance(profile, TrainingProfile)
    assert (profile.model, profile.gpu) == ("M", "A100-80G")
    assert profile.points.tolist() == [[1.0, 2.0], [4.0, 1.0]]
    assert profile.forward_s.sum(axis=1) == pytest.approx([0.11, 0.11])


def test_true_profiles_pass_the_audit(gpu, linear_profile, attention_profile):
    assert audit(linear_profile(), gpu) == []
    assert audit(attention_profile(), gpu) == []
    tables = calibrate([linear_profile(), attention_profile()])
    assert (len(tables.linear), len(tables.decode), len(tables.prefill)) == (20, 1, 1)


@pytest.mark.parametrize(("factor", "text"), [(1 / 8, "impossible"), (8.0, "other units"), (1000.0, "other units")])
def test_units_that_are_off_are_refused(gpu, linear_profile, attention_profile, factor, text):
    for profile in (linear_profile(factor=factor), attention_profile(factor=factor)):
        (finding,) = audit(profile, gpu)
        assert text in finding.text
        with pytest.raises(ConfigError, match=profile.source):
            calibrate([profile])


def test_sizes_in_bits_and_an_experts_feed_forward_are_refused(gpu, linear_profile):
    profile = linear_profile()
    (finding,) = audit(replace(profile, shape=replace(profile.shape, ffn=768)), gpu)
    assert "experts" in finding.text
    sizes = np.array([1e6, 1e8])
    seconds = 2 * 7 / 8 * sizes / 180e9 + 2e-5
    true = CollectiveProfile("n.csv", gpu.name, "all_reduce", 8, 8, sizes, seconds)
    assert audit(true, gpu) == []
    (finding,) = audit(replace(true, num_bytes=8 * sizes), gpu)
    assert "cannot be" in finding.text


def test_calibration_is_of_one_named_gpu(linear_profile):
    profile = linear_profile()
    for wrong in ([replace(profile, gpu=None)], [profile, replace(profile, gpu="H100-80G")], []):
        with pytest.raises(ConfigError):
            calibrate(wrong)
    assert calibrate([replace(profile, gpu=None)], "A100-80G").gpu.name == "A100-80G"


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
