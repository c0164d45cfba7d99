import asyncio
import functools
from enum import Enum
from typing import Annotated

import pytest
from pydantic import BaseModel, Field, TypeAdapter

from libra.envs import FunctionEnvironment, tool
from libra.envs.actions import processes_for, run_action
from libra.errors import ConfigError
from libra.types import ToolCall, ToolStatus


def weather(city: str, days: int = 1, action_id: str = "") -> str:
    """Forecast for a city.

    Args:
        city: Its name.
        days: How many days ahead.
    """
    return f"{city} {days} {action_id}"


def no_hint(city) -> str:
    """Forecast.

    Args:
        city: Its name.
    """
    return city


def no_description(city: str, days: int) -> str:
    """Forecast.

    Args:
        city: Its name.
    """
    return city


def positional(*cities: str) -> str:
    """Forecast."""
    return cities[0]


def test_schema_says_what_the_function_says_and_hides_the_action_id():
    made = tool(weather)
    function = made.schema["function"]
    assert made.schema["type"] == "function"
    assert (function["name"], function["description"]) == ("weather", "Forecast for a city.")
    assert function["parameters"]["properties"] == {
        "city": {"type": "string", "description": "Its name."},
        "days": {"type": "integer", "description": "How many days ahead."},
    }
    assert made.required == ("city",)
    assert made.takes_action_id
    assert not made.is_async
    assert made.usage == '{"name": "weather", "arguments": {"city": ..., "days": ...}}'


@pytest.mark.parametrize(
    ("function", "says"), [(no_hint, "city"), (no_description, "days"), (positional, "positional")]
)
def test_a_function_that_cannot_be_a_tool_says_what_to_add(function, says):
    with pytest.raises(ConfigError, match=says):
        tool(function)


class Unit(Enum):
    C = "c"
    F = "f"


class Place(BaseModel):
    title: str
    unit: Unit = Unit.C


class Chain(BaseModel):
    next: "Chain | None"


UNIT = {"enum": ["c", "f"], "type": "string"}
PLACE = {
    "properties": {"title": {"type": "string"}, "unit": {**UNIT, "default": "c"}},
    "required": ["title"],
    "type": "object",
}


def takes(hint):
    def given(x):
        """Given.

        Args:
            x: It.
        """
        return repr(x)

    given.__annotations__ = {"x": hint}
    return given


@pytest.mark.parametrize(
    ("hint", "schema", "value", "wrong"),
    [
        (Unit, UNIT, Unit.C, "k"),
        (Unit | None, {**UNIT, "nullable": True}, None, "k"),
        (list[Unit], {"items": UNIT, "type": "array"}, [Unit.F], ["k"]),
        (Place, PLACE, Place(title="x"), {"title": 3}),
        (Annotated[int, Field(ge=1)], {"minimum": 1, "type": "integer"}, 2, 0),
        (int | str, {"type": ["integer", "string"]}, 2, 0.5),
    ],
)
def test_a_hint_may_be_whatever_pydantic_knows(hint, schema, value, wrong):
    environment = FunctionEnvironment(prompts=["q"], reward=lambda completion: 0.0, tools=[takes(hint)])
    assert environment.tools[0].parameters["x"] == {**schema, "description": "It."}

    def act(given):
        call = ToolCall("given", {"x": given})
        return asyncio.run(run_action(environment, environment.prompt("train", 0), call, action_id="a"))

    assert act(TypeAdapter(hint).dump_python(value, mode="json")).content == repr(value)
    assert act(wrong).status is ToolStatus.MALFORMED


@pytest.mark.parametrize("hint", [Chain, type("Odd", (), {})])
def test_a_type_without_a_schema_is_named_with_its_argument(hint):
    with pytest.raises(ConfigError, match=f"'x'.*{hint.__name__}"):
        tool(takes(hint))


@pytest.mark.parametrize("own", [{}, pytest.param({"cores": 1}, marks=pytest.mark.live)])
def test_a_wrapper_that_returns_a_coroutine_is_awaited(own):
    async def slow(city: str) -> str:
        """Forecast.

        Args:
            city: Its name.
        """
        await asyncio.sleep(0)
        return city

    wrapped = functools.wraps(slow)(lambda **given: slow(**given))
    environment = FunctionEnvironment(prompts=["q"], reward=lambda completion: 0.0, tools=[tool(wrapped, **own)])
    processes, call = processes_for(environment, [0]), ToolCall("slow", {"city": "Rome"})
    done = run_action(environment, environment.prompt("train", 0), call, action_id="a", processes=processes)
    assert asyncio.run(done).content == "Rome"
    if processes is not None:
        processes.close()


@pytest.mark.parametrize("wrong", [{"timeout_s": 0.0}, {"timeout_s": float("nan")}, {"max_payload_chars": 0}])
def test_limits_must_be_positive(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        tool(weather, **wrong)


@pytest.mark.parametrize("resources", [{}, {"quota": "search"}])
def test_a_call_that_shares_the_workers_process_cannot_be_revocable(resources):
    with pytest.raises(ConfigError, match="revocable"):
        tool(weather, revocable=True, **resources)
    assert tool(weather, revocable=True, memory_gib=1).revocable and not tool(weather, cores=1).revocable
