"""The gateway where something is too much, too long or not there: what unmodified clients see, and that nothing is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from libra.agents.messages import Message
from libra.errors import RequestRefused

pytest.importorskip("starlette", reason="the extra `agents` is not installed")
pytest.importorskip("uvicorn", reason="the extra `agents` is not installed")
httpx2 = pytest.importorskip("httpx2", reason="httpx2 is not installed")
openai = pytest.importorskip("openai", reason="openai is not installed")
anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")

from gateway_place import CHAT, Place, made, run, taken  # noqa: E402

from libra.agents.gateway import MAX_BODY_BYTES  # noqa: E402

ASKED: Any = [{"role": "user", "content": "6*7?"}]
Ask = Callable[..., Any]


def openai_client(here: Place, **options: Any) -> Any:
    env = here.gateway.environ(here.token)
    return openai.AsyncOpenAI(base_url=env["OPENAI_BASE_URL"], api_key=env["OPENAI_API_KEY"], **options)


def anthropic_client(here: Place, **options: Any) -> Any:
    env = here.gateway.environ(here.token)
    return anthropic.AsyncAnthropic(base_url=env["ANTHROPIC_BASE_URL"], api_key=env["ANTHROPIC_API_KEY"], **options)


async def chat(here: Place, **options: Any) -> str:
    answer = await openai_client(here, **options).chat.completions.create(model="p", messages=ASKED)
    return str(answer.choices[0].message.content)


async def chat_streamed(here: Place, **options: Any) -> str:
    stream = await openai_client(here, **options).chat.completions.create(model="p", messages=ASKED, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def responses(here: Place, **options: Any) -> str:
    return str((await openai_client(here, **options).responses.create(model="p", input="6*7?")).output_text)


async def messages(here: Place, **options: Any) -> str:
    answer = await anthropic_client(here, **options).messages.create(model="p", max_tokens=9, messages=ASKED)
    return str(answer.content[0].text)


async def messages_streamed(here: Place, **options: Any) -> str:
    client = anthropic_client(here, **options)
    async with client.messages.stream(model="p", max_tokens=9, messages=ASKED) as stream:
        return str((await stream.get_final_message()).content[0].text)


ASKS = [chat, chat_streamed, responses, messages, messages_streamed]
TIMED_OUT = (openai.APITimeoutError, anthropic.APITimeoutError, httpx2.TimeoutException)


@pytest.mark.parametrize("ask", ASKS)
def test_a_client_waits_longer_than_its_time_out_because_of_signs_of_life(ask: Ask) -> None:
    async def test(here: Place) -> None:
        asked = asyncio.create_task(ask(here, timeout=0.5, max_retries=0))
        pending = await taken(here)
        answer = made(Message("assistant", "late"))
        asyncio.get_running_loop().call_later(1.5, here.session.answered, pending, answer)
        assert await asked == "late"

    run(test, script=False, heartbeat_s=0.1)


@pytest.mark.parametrize("ask", ASKS)
def test_without_them_it_would_not(ask: Ask) -> None:
    async def test(here: Place) -> None:
        with pytest.raises(TIMED_OUT):
            await ask(here, timeout=0.3, max_retries=0)

    run(test, script=False, heartbeat_s=60.0)


def test_a_client_that_is_turned_away_tries_again() -> None:
    statuses: list[int] = []

    async def test(here: Place) -> None:
        turned_away = asyncio.Event()

        async def told(response: Any) -> None:
            statuses.append(response.status_code)
            turned_away.set()

        first = asyncio.create_task(here.post("/v1/chat/completions", CHAT))
        pending = await taken(here)
        async with httpx2.AsyncClient(event_hooks={"response": [told]}) as http:
            second = asyncio.create_task(chat(here, http_client=http, max_retries=8))
            await turned_away.wait()
            here.session.answered(pending, made(Message("assistant", "one")))
            assert (await first).status_code == 200
            await here.client.aclose()  # the one connection that there may be
            pending = await taken(here)
            assert len(pending.request.messages) == 1
            here.session.answered(pending, made(Message("assistant", "two")))
            assert await second == "two"
        assert here.gateway.counts["requests"] == 2 and here.gateway.counts["retries"] == 1

    run(test, script=False, max_connections=2)  # uvicorn turns away the connection that reaches this number
    assert statuses[0] == 503 and statuses[-1] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_while_it_gets_signs_of_life_is_not_answered(stream: bool) -> None:
    async def test(here: Place) -> None:
        async with here.client.stream(
            "POST", f"{here.url}/v1/chat/completions", json=CHAT | {"stream": stream}
        ) as answer:
            pending = await here.session.news.get()
            await anext(answer.aiter_text())
        assert (await here.session.news.get()) is pending and pending.waiting == 0
        other = asyncio.create_task(here.post("/v1/chat/completions", CHAT | {"max_tokens": 5}))
        next_one = await taken(here)
        assert next_one.request.max_tokens == 5, "the one that was given up is dropped"
        here.session.answered(next_one, made(Message("assistant", "x")))
        assert (await other).status_code == 200 and here.gateway.counts["gone"] == 1

    run(test, script=False, heartbeat_s=0.02)


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (chat, openai.BadRequestError),
        (chat_streamed, openai.APIError),
        (messages, anthropic.BadRequestError),
        (messages_streamed, anthropic.APIStatusError),
    ],
)
def test_an_error_after_signs_of_life_reaches_the_client(
    ask: Ask, error: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(here: Place) -> None:
        asked = asyncio.create_task(ask(here, max_retries=1))
        refusal = RequestRefused("the context is full", "messages", code="context_length_exceeded")

        async def refuse() -> None:
            first = await taken(here)
            asyncio.get_running_loop().call_later(0.5, first.refuse, refusal)  # signs of life were sent by then
            while True:
                (await taken(here)).refuse(refusal)

        refusing = asyncio.create_task(refuse())
        with pytest.raises(error, match="context is full"):
            await asked
        refusing.cancel()

    with caplog.at_level(logging.ERROR):
        run(test, script=False, heartbeat_s=0.02)
    found = [
        record for record in caplog.records if "aclose" not in record.getMessage()
    ]  # clients of tests before, collected now
    assert not found, "a refusal is no fault of the server"


@pytest.mark.parametrize(
    ("method", "path", "anthropic_form"),
    [
        ("POST", "/v1/embeddings", False),
        ("GET", "/v1/chat/completions", False),
        ("POST", "/v1/messages/count_tokens", True),
        ("GET", "/", False),
    ],
)
def test_a_path_that_is_not_there_is_told_in_the_clients_dialect(method: str, path: str, anthropic_form: bool) -> None:
    async def test(here: Place) -> None:
        answer = await here.client.request(method, here.url + path, json={} if method == "POST" else None)
        told = answer.json()
        assert answer.status_code == (405 if path.endswith("completions") else 404)
        assert f"{method} {path}: not answered here; allowed are /v1/chat/completions" in told["error"]["message"]
        assert (told.get("type") == "error") == anthropic_form and here.token not in told["error"]["message"]

    run(test)


def test_clients_know_what_is_wrong_with_their_token_and_their_body() -> None:
    async def test(here: Place) -> None:
        token, here.token = here.token, "unknown"
        with pytest.raises(openai.AuthenticationError, match="no trajectory has this token"):
            await chat(here)
        with pytest.raises(anthropic.AuthenticationError, match="no trajectory has this token"):
            await messages(here)
        here.token = token
        huge = [{"role": "user", "content": "x" * MAX_BODY_BYTES}]
        with pytest.raises(openai.APIStatusError, match="more than 16,777,216 bytes") as told:
            await openai_client(here).chat.completions.create(model="p", messages=huge)
        assert told.value.status_code == 413
        with pytest.raises(anthropic.APIStatusError, match="more than 16,777,216 bytes"):
            await anthropic_client(here).messages.create(model="p", max_tokens=9, messages=huge)
        strict = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"type": "object"}}}
        with pytest.raises(openai.BadRequestError, match="a strict schema"):
            await openai_client(here).chat.completions.create(model="p", messages=ASKED, response_format=strict)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await openai_client(here).responses.create(model="p", input="x", previous_response_id="resp_1")
        must = {"tools": CHAT["tools"], "tool_choice": "required"}  # may be answered without a call
        assert (await openai_client(here).chat.completions.create(model="p", messages=ASKED, **must)).choices
        here.gateway.drop(here.token, "it has ended")
        with pytest.raises(openai.ConflictError, match="has ended"):
            await chat(here)
        with pytest.raises(anthropic.ConflictError, match="has ended"):
            await messages(here)
        assert len(here.seen) == 1, "nothing that was refused reached the model"

    run(test)
