"""Reading profiles, refusing what cannot be one, and calibrating from the rest."""

import json
from dataclasses import replace

import numpy as np
import pytest

from libra.errors import ConfigError
from libra.hardware.profile_audit import audit
from libra.hardware.profile_calibration import calibrate
from libra.hardware.profiles import (
    AttentionProfile,
    CollectiveProfile,
    LinearProfile,
    TrainingProfile,
    gpu_in_path,
    read_directory,
    read_profiles,
)

MLP = """time_stats.mlp_up_proj.median,time_stats.mlp_up_proj.std,n_head,n_kv_head,n_embd,n_expanded_embd,vocab_size,num_tokens,\
num_tensor_parallel_workers
0.4,0,32,8,4096,14336,128256,16,1
0.6,0,32,8,4096,14336,128256,16,1
0.1,0,32,8,4096,14336,128256,1,1
0.2,0,32,8,4096,14336,128256,16,2
"""


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
    assert len(calibrate([linear_profile(), attention_profile()]).errors) == 12


@pytest.mark.parametrize(("factor", "text"), [(1 / 8, "impossible"), (8.0, "off by 8"), (1000.0, "off by 1,000")])
def test_units_that_are_off_are_refused(gpu, linear_profile, attention_profile, factor, text):
    for profile in (linear_profile(factor=factor), attention_profile(factor=factor)):
        (finding,) = audit(profile, gpu, [])
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
    assert "bits" in finding.text


def test_calibration_is_of_one_named_gpu(linear_profile):
    profile = linear_profile()
    for wrong in ([replace(profile, gpu=None)], [profile, replace(profile, gpu="H100-80G")], []):
        with pytest.raises(ConfigError):
            calibrate(wrong)
    errors = {each.operator: each for each in calibrate([replace(profile, gpu=None)], "A100-80G").errors}
    assert errors["mlp_up_proj"].table_frac < 0.2
    assert errors["mlp_up_proj"].num_points == 2 * len(profile.curves[0].tokens)
