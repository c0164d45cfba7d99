import pytest

from libra.envs import tool
from libra.errors import ConfigError


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


@pytest.mark.parametrize("wrong", [{"timeout_s": 0.0}, {"timeout_s": float("nan")}, {"max_payload_chars": 0}])
def test_limits_must_be_positive(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        tool(weather, **wrong)


@pytest.mark.parametrize("resources", [{}, {"quota": "search"}])
def test_a_call_that_shares_the_workers_process_cannot_be_revocable(resources):
    with pytest.raises(ConfigError, match="revocable"):
        tool(weather, revocable=True, **resources)
    assert tool(weather, revocable=True, memory_gib=1).revocable and not tool(weather, cores=1).revocable
