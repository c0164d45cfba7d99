"""Every case of verl's own answers."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter

import pytest

from libra.envs.rewards import boxed, dapo_math, gsm8k, symbolic

installed = importlib.util.find_spec("math_verify") is not None


def dapo(case, **options):
    verdict = dapo_math.verdict(case["text"], case["ground_truth"], **options)
    return {"score": verdict.score, "acc": verdict.correct, "pred": verdict.given}


AS_VERL = {
    "gsm8k.extract_solution": lambda case: gsm8k.extract(case["text"], case["method"], like="verl"),
    "gsm8k.compute_score": lambda case: gsm8k.score(
        case["text"], case["ground_truth"], case["method"], format_score=case["format_score"], like="verl"
    ),
    "math_reward.compute_score": lambda case: boxed.score(case["text"], case["ground_truth"]),
    "math_dapo.compute_score": dapo,
    "math_dapo.compute_score(strict_box_verify=True)": lambda case: dapo(case, box_only=True),
    "math_verify (verl configuration: gold boxed+LaTeX, pred Expr|LaTeX)": lambda case: symbolic.score(
        case["text"], case["ground_truth"]
    ),
}


@pytest.fixture(scope="module")
def cases(repository):
    return json.loads((repository / "tests" / "golden" / "reward_functions.json").read_text())["cases"]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(
            name,
            marks=[pytest.mark.live, pytest.mark.skipif(not installed, reason="type pip install 'libra-rl[math]'")],
        )
        if name.startswith("math_verify")
        else name
        for name in AS_VERL
    ],
)
def test_every_case_is_verls(cases, function):
    mine = [case for case in cases if case["fn"] == function]
    assert mine
    for case in mine:
        assert AS_VERL[function](case) == case["out"], case


def test_no_function_of_the_golden_file_is_left_out(cases):
    assert Counter(case["fn"] in AS_VERL for case in cases) == {True: 208}
