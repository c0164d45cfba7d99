"""Seconds of a TP degree that a run never had: of a calibration, the configured GPU, or the workers' own, in this order."""

import pytest

from libra.config import config_from_dict
from libra.hardware import engine_seconds
from libra.hardware.run_calibration import EngineOfRun, RunCalibration
from libra.planner.arrangement_forecast import ratio_of, run_facts
from libra.types import StepSeconds

MODEL = "Qwen3-0.6B"


def calibration(path, seconds, model=MODEL):
    """A file in which a pass of each degree takes so many seconds."""
    engines = tuple(
        EngineOfRun(
            f"rollout-{tp}", "vllm", f"tp{tp}", tp, 8, 10_000, StepSeconds(s, 0.0, 0.0, 0.0, 100, 0.0)
        )
        for tp, s in seconds.items()
    )  # fmt: skip
    path.write_text(RunCalibration(model, "", engines, None).to_json())
    return path


def config(**planner):
    return config_from_dict(
        {"model": {"path": MODEL}, "rollout": {"engine": "vllm"}, "planner": {"replan": "advise", **planner}}
    )


def modelled(gpu):
    one, two = (engine_seconds(gpu, MODEL, tp).decode_step_s(4, 400.0) for tp in (1, 2))
    return two / one


def test_a_calibration_is_asked_before_the_tables_of_a_gpu(tmp_path):
    path = calibration(tmp_path / "c.json", {1: 0.02, 2: 0.05})
    ratio = ratio_of(config(calibration=str(path), gpu="H100-80G"), "A100-80G")
    assert ratio(1, 2, 4.0, 100.0) == (pytest.approx(2.5), f"what {path} measured")
    found = ratio(1, 4, 4.0, 100.0)  # it did not measure TP 4
    assert found is not None and found[1] == "the cost model of H100-80G"


@pytest.mark.parametrize(
    ("named", "workers", "used"),
    [("H100-80G", "A100-80G", "H100-80G"), (None, "H100-80G", "H100-80G"), (None, "cpu", "A800-80G")],
)
def test_the_configured_gpu_is_asked_before_the_workers_own(named, workers, used):
    found = ratio_of(config(gpu=named), workers)(1, 2, 4.0, 100.0)
    assert found == (pytest.approx(modelled(used)), f"the cost model of {used}")


def test_degrees_that_cannot_be_are_named_with_the_setting():
    facts = run_facts(config(tp=[1, 2]))
    assert facts.may_have("vllm", 2) == ""
    assert "rollout.engine=vllm" in facts.may_have("transformers", 2)
    assert "planner.tp with 4" in facts.may_have("vllm", 4)
    assert facts.ratio(1, 3, 4.0, 100.0) is None  # no heads divide by 3
