"""A reward model as a service, shared by all graders of a worker; on two cores.

Two services are asked about every answer: ``judge``, a frozen language model that says how likely it finds what was written, and
``checker``, a plain function that compares numbers, thirty-two answers at a time. The reward is a weighted sum of both.

    python workflows/judge.py [section.key=value ...]
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import libra
from libra.config import typed_settings
from libra.envs.tool_arithmetic import ToolArithmetic
from libra.errors import LibraError

QUESTIONS = 200
_INTEGER = re.compile(r"-?\d+")


def right(inputs: Sequence[Mapping[str, Any]]) -> list[float]:
    """1 for each answer whose last number is the right one: what a service without a model looks like."""
    numbers = [_INTEGER.findall(given["completion"]) for given in inputs]
    return [float(found[-1:] == [str(given["answer"])]) for found, given in zip(numbers, inputs, strict=True)]


SERVICES = {
    "judge": libra.service("logprob", model="libra/tiny-arithmetic", max_batch=16, max_wait_s=0.02),
    "checker": libra.service(right, max_batch=32, max_wait_s=0.02),
}


def main(**settings: Any) -> Any:
    """A few iterations of the quick start's task, graded by services."""
    task = ToolArithmetic(inline=True)
    asked = [task.prompt("train", number) for number in range(QUESTIONS)]
    return libra.train(
        prompts=[{"prompt": list(each.messages), "answer": each.facts["answer"]} for each in asked],
        tools=list(task.tools),
        reward=[{"service": "checker"}, {"service": "judge", "weight": 0.05}],
        services=SERVICES,
        config="libra/quickstart",
        **({"run__iterations": 5, "evaluation__prompts": 0, "cluster__dashboard_port": 0} | settings),
    )


def typed(arguments: list[str]) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("override", nargs="*", help="section.key=value")
    overrides = parser.parse_intermixed_args(arguments).override
    try:
        summary = main(**typed_settings(overrides))
    except LibraError as error:
        print(f"judge: {error}", file=sys.stderr)
        return 2
    print(f"{len(summary.iterations)} iterations; reward of the last: {summary.iterations[-1]['reward']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(typed(sys.argv[1:]))
