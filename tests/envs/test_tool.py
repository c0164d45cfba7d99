import asyncio
import json
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, TypeAdapter, create_model

from libra.envs import FunctionEnvironment, tool
from libra.envs.tool_calls import run_action
from libra.errors import ConfigError
from libra.types import Prompt, ToolCall, ToolStatus


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


Unit = Enum("Unit", {"C": "c", "F": "f"})
Place = create_model("Place", title=str, unit=(Unit, Unit.C))
UNIT = {"enum": ["c", "f"], "type": "string"}
FIELDS = {"title": {"type": "string"}, "unit": {**UNIT, "default": "c"}}
PLACE = {"properties": FIELDS, "required": ["title"], "type": "object"}


def takes(hint):
    def given(city):
        return repr(city)

    given.__doc__, given.__annotations__ = no_hint.__doc__, {"city": hint}
    return given


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


def test_the_text_of_a_schema_is_the_one_that_models_were_trained_on():
    """As `transformers.utils.get_json_schema` writes it, to the order of keys."""

    def given(
        a: list[int], b: dict[str, float], c: int | str, d: tuple[int, str], e: dict, f: list,
        g: bool | None = None, h: Literal["x", "y"] | None = None, i: list[str] | str = "", trajectory_state: Any = None,
    ) -> str:  # fmt: skip
        """Does it:

        well.

        Args:
            a: 1st.
            b: 2nd,
                on two lines.
            c: 3rd.
            d: 4th.
            e: 5th.
            f: 6th.
            g: 7th.
            h: 8th.
            i: 9th.

        Returns:
            Text.
        """

    assert json.dumps(tool(given).schema) == (
        '{"type": "function", "function": {"name": "given", "description": "Does it:\\n\\nwell.", "parameters": {"type": '
        '"object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, "description": "1st."}, "b": {"type": '
        '"object", "additionalProperties": {"type": "number"}, "description": "2nd, on two lines."}, "c": {"type": ["integer", '
        '"string"], "description": "3rd."}, "d": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], '
        '"description": "4th."}, "e": {"type": "object", "description": "5th."}, "f": {"type": "array", "description": "6th."}, '
        '"g": {"type": "boolean", "nullable": true, "description": "7th."}, "h": {"type": "string", "enum": ["x", "y"], '
        '"nullable": true, "description": "8th."}, "i": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": '
        '"string"}], "description": "9th."}}, "required": ["a", "b", "c", "d", "e", "f"]}}}'
    )


@pytest.mark.parametrize(
    ("function", "says"),
    [(no_hint, "city"), (no_description, "days"), (positional, "positional"), (takes(Exception), "'city'.*Exception")],
)
def test_a_function_that_cannot_be_a_tool_says_what_to_add(function, says):
    with pytest.raises(ConfigError, match=says):
        tool(function)


@pytest.mark.parametrize(("hint", "schema", "value", "wrong"), [
    (Unit, UNIT, Unit.C, "k"),
    (Unit | None, {**UNIT, "nullable": True}, None, "k"),
    (list[Unit], {"items": UNIT, "type": "array"}, [Unit.F], ["k"]),
    (Place, PLACE, Place(title="x"), {"title": 3}),
    (Annotated[int, Field(ge=1)], {"minimum": 1, "type": "integer"}, 2, 0),
])  # fmt: skip
def test_a_hint_may_be_whatever_pydantic_knows(hint, schema, value, wrong):
    environment = FunctionEnvironment(prompts=["q"], reward="tag_format", tools=[takes(hint)])
    assert environment.tools[0].parameters["city"] == {**schema, "description": "Its name."}

    given = TypeAdapter(hint).dump_python(value, mode="json")
    calls = [ToolCall("given", {"city": each}) for each in (given, wrong)]
    right, refused = [asyncio.run(run_action(environment, Prompt("", ()), call, action_id="a")) for call in calls]
    assert (right.content, refused.status) == (repr(value), ToolStatus.MALFORMED)


@pytest.mark.parametrize("wrong", [{"timeout_s": 0.0}, {"timeout_s": float("nan")}, {"max_payload_chars": 0}])
def test_limits_must_be_positive(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        tool(weather, **wrong)


@pytest.mark.parametrize("resources", [{}, {"quota": "search"}])
def test_a_call_that_shares_the_workers_process_cannot_be_revocable(resources):
    with pytest.raises(ConfigError, match="revocable"):
        tool(weather, revocable=True, **resources)
    assert tool(weather, revocable=True, memory_gib=1).revocable and not tool(weather, cores=1).revocable
