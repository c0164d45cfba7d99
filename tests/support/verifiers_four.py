"""The four classes of environments of verifiers, as its users write them. Imported in its own virtual environment."""

import verifiers as vf
from datasets import Dataset

ROWS = Dataset.from_list([{"question": "6*7?", "answer": "42"}, {"question": "2*21?", "answer": "42"}])


def right(completion, answer):
    """1 if the last message has the answer."""
    last = completion[-1]
    return float(answer in str(last["content"] if isinstance(last, dict) else last.content))


def calc(expression: str) -> str:
    """Computes.

    Args:
        expression: What to compute.
    """
    return "42" if expression == "6*7" else "?"


class Doubting(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **options):
        return [{"role": "user", "content": "Are you sure?"}]


class Counting(vf.StatefulToolEnv):
    """Its tool gets a number that the model does not see."""

    async def setup_state(self, state, **options):
        state["calls"] = 0
        return state

    def update_tool_args(self, tool_name, tool_args, messages, state, **options):
        state["calls"] += 1
        return {**tool_args, "number": state["calls"]}


def numbered(expression: str, number: int) -> str:
    """Computes, and counts.

    Args:
        expression: What to compute.
        number: Which call it is.
    """
    return f"call {number}: {calc(expression)}"


def load_environment(kind: str) -> vf.Environment:
    """The environment of a class."""
    common = {"dataset": ROWS, "eval_dataset": ROWS, "rubric": vf.Rubric(funcs=[right])}
    if kind == "single":
        return vf.SingleTurnEnv(**common)
    if kind == "multi":
        return Doubting(max_turns=3, **common)
    if kind == "tool":
        return vf.ToolEnv(tools=[calc], max_turns=4, **common)
    made = Counting(max_turns=4, **common)
    made.add_tool(numbered, args_to_skip=["number"])
    return made
