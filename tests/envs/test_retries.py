"""Calls that an API refuses for now: never an outcome while retries are left."""

import asyncio
from email.utils import formatdate
from types import SimpleNamespace
from urllib.error import HTTPError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.envs import FunctionEnvironment, run_action, run_grader, tool
from libra.envs.retries import TOTAL_S, BackOff, Refused, refused, with_retries
from libra.envs.tool_calls import processes_for
from libra.errors import RateLimited, RewardFault, ToolFault
from libra.types import EndReason, Episode, Prompt, ToolCall, ToolStatus

PROMPT = Prompt("p", ({"role": "user", "content": "?"},))
QUICK = BackOff(retries=3, first_s=0.001)


class Api:
    """An API that refuses the first calls; it counts them in a file, which calls in other processes see."""

    def __init__(self, refusals, directory):
        self.refusals, self.file = refusals, directory / f"asked-{refusals}"
        self.file.touch()

    @property
    def asked(self):
        return len(self.file.read_bytes())

    def look_up(self) -> str:
        """Look something up."""
        with self.file.open("ab") as file:
            file.write(b".")
        if self.asked <= self.refusals:
            raise HTTPError("u", 429, "slow down", {"Retry-After": "0"}, None)
        return "0.75"


@pytest.fixture
def twice(tmp_path):
    return Api(2, tmp_path)


@pytest.fixture
def always(tmp_path):
    return Api(10**6, tmp_path)


def environment(api, **resources):
    tools = [tool(api.look_up, **resources)]
    return FunctionEnvironment(prompts=["a"] * 3, reward=lambda completion: float(api.look_up()), tools=tools)


def acted(api, **resources):
    made = environment(api, **resources)
    processes, call = processes_for(made, [0]), ToolCall("look_up", {})
    how = {"processes": processes, "cores": 1, "back_off": QUICK}
    try:
        return asyncio.run(run_action(made, PROMPT, call, action_id="t/0/0", **how))
    finally:
        if processes is not None:
            processes.close()


WAYS = [pytest.param({}, id="thread"), pytest.param({"cores": 1}, id="process", marks=pytest.mark.live)]


@pytest.mark.parametrize("resources", WAYS)
def test_the_model_reads_what_the_tool_returns_in_the_end(twice, resources):
    returned = acted(twice, **resources)
    assert (returned.status, returned.content, twice.asked) == (ToolStatus.OK, "0.75", 3)


@pytest.mark.parametrize("resources", WAYS)
def test_a_tool_that_is_refused_for_too_long_has_failed_and_the_model_reads_nothing(always, resources):
    with pytest.raises(ToolFault):
        acted(always, **resources)
    assert always.asked == 4


def test_a_refused_reward_is_no_reward_of_0(twice, always):
    episode = Episode("train-0-0-0", PROMPT, (), EndReason.ANSWERED)
    assert asyncio.run(run_grader(environment(twice), episode, back_off=QUICK)) == 0.75
    assert twice.asked == 3
    with pytest.raises(RewardFault):
        asyncio.run(run_grader(environment(always), episode, back_off=QUICK))


def test_other_errors_are_not_tried_again():
    calls = []

    def wrong(completion: str) -> float:
        calls.append(completion)
        raise HTTPError("u", 503, "no", {"Retry-After": "7"}, None)

    made = FunctionEnvironment(prompts=["a"] * 3, reward=wrong)
    with pytest.raises(RewardFault, match="503"):
        asyncio.run(run_grader(made, Episode("train-0-0-0", PROMPT, (), EndReason.ANSWERED), back_off=QUICK))
    assert len(calls) == 1


@pytest.mark.parametrize(("error", "told"), [
    (None, None),
    (ValueError("429"), None),
    (RateLimited("slow down", 2.5), Refused(2.5)),
    (HTTPError("u", 429, "", {"Retry-After": "7"}, None), Refused(7.0)),
    (SimpleNamespace(status_code=429, response=SimpleNamespace(headers={"retry-after": "3"})), Refused(3.0)),
    (SimpleNamespace(response=SimpleNamespace(status_code=429, headers={})), Refused(None)),
    (SimpleNamespace(status=429, headers={"Retry-After": formatdate(1040, usegmt=True)}), Refused(40.0)),
    (SimpleNamespace(status=429, headers={"Retry-After": "soon"}), Refused(None)),
    (SimpleNamespace(status=429, headers={"Retry-After": f"Mon, 01 Jan {'9' * 20} 00:00:00 GMT"}), Refused(None)),
    (RateLimited("slow down", float("nan")), Refused(None)),
    (RateLimited("slow down", 10**400), Refused(None)),
])  # fmt: skip
def test_clients_of_http_are_understood(error, told):
    assert refused(error, 1000.0) == told


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only in `wait`."""

    def __init__(self):
        super().__init__()
        self.at_s = 0.0
        self.waits: list[float] = []

    def time(self):
        return self.at_s

    async def wait(self, seconds):
        self.waits.append(seconds)
        self.at_s += seconds


@given(
    st.integers(0, 8), st.floats(0.01, 10.0), st.integers(0, 99),
    st.lists(st.none() | st.floats(0.0, 50.0), min_size=9, max_size=9),
)  # fmt: skip
def test_waits_double_are_as_long_as_the_api_says_and_end(retries, first_s, seed, said):
    clock, back_off = VirtualLoop(), BackOff(retries, first_s, seed)
    answers = iter(said)

    async def call():
        return Refused(next(answers))

    with asyncio.Runner(loop_factory=lambda: clock) as runner:
        _, made = runner.run(with_retries(call, lambda each: each, back_off, "c", clock.wait))
    assert made == len(clock.waits) <= retries
    assert sum(clock.waits) <= TOTAL_S
    for n, waited_s in enumerate(clock.waits):
        least_s, most_s = first_s * 2**n / 2, first_s * 2**n
        assert waited_s >= max(least_s, said[n] or 0.0)
        assert waited_s <= max(most_s, said[n] or 0.0)
    if made < retries:  # it gave up because the next wait would have ended too late
        assert clock.at_s + max(first_s * 2**made, said[made] or 0.0) > TOTAL_S
