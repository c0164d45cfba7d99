"""Every case of verl's own answers."""

import importlib.util
import json

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


NEEDS = [pytest.mark.live, pytest.mark.skipif(not installed, reason="type pip install -e '.[math]'")]


@pytest.fixture(scope="module")
def cases(repository):
    found = json.loads((repository / "tests" / "golden" / "reward_functions.json").read_text())["cases"]
    assert len(found) == 208 and {case["fn"] for case in found} == AS_VERL.keys()
    return found


@pytest.mark.parametrize(
    "function", [pytest.param(name, marks=NEEDS if name.startswith("math_verify") else ()) for name in AS_VERL]
)
def test_every_case_is_verls(cases, function):
    for case in cases:
        if case["fn"] == function:
            assert AS_VERL[function](case) == case["out"], case
