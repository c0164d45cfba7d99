"""The gateway over HTTP: dialects, streams, errors, retries, disconnects, heartbeats; the model is a script."""

import asyncio
import json
import platform

import pytest

from libra.agents.messages import Call, Message

pytest.importorskip("httptools", reason="type pip install -e '.[agents]'")
httpx2 = pytest.importorskip("httpx2", reason="type pip install httpx2")
openai = pytest.importorskip("openai", reason="type pip install openai")
anthropic = pytest.importorskip("anthropic", reason="type pip install anthropic")

from gateway_place import CHAT, made, placed, taken  # noqa: E402

from libra.agents.gateway import MAX_BODY_BYTES  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def _platform_is_known():
    """Clients ask for it once, and Python starts ``uname`` for it."""
    platform.processor()


def openai_client(here, **options):
    env = here.gateway.environ(here.token)
    return openai.AsyncOpenAI(base_url=env["OPENAI_BASE_URL"], api_key=env["OPENAI_API_KEY"], **options)


def anthropic_client(here, **options):
    env = here.gateway.environ(here.token)
    return anthropic.AsyncAnthropic(base_url=env["ANTHROPIC_BASE_URL"], api_key=env["ANTHROPIC_API_KEY"], **options)


@placed()
async def test_the_openai_client_plain_and_streamed(here):
    client = openai_client(here)
    answer = await client.chat.completions.create(**CHAT, logprobs=True, extra_body={"return_token_ids": True})
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("calc", {"expression": "6*7"})
    assert answer.choices[0].finish_reason == "tool_calls" and answer.usage.completion_tokens == 3
    assert answer.choices[0].message.reasoning_content == "hm" and answer.choices[0].token_ids == [10, 11, 12]
    assert [each.logprob for each in answer.choices[0].logprobs.content] == [-0.5] * 3
    said = [*CHAT["messages"], answer.choices[0].message.model_dump(exclude_none=True)]
    said.append({"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "42"}]})
    stream = await client.chat.completions.create(**CHAT | {"messages": said}, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "42"
    sent = here.seen[1].messages
    assert sent[1:] == (
        Message("assistant", "", (Call("call_0_0", "calc", '{"expression":"6*7"}'),), "", "hm"),
        Message("tool", "42", (), call.id),
    )
    models = await client.models.list()
    assert [model.max_model_len for model in models.data] == [512]
    answer = await client.responses.create(model="policy", input="6*7?", instructions="s", tools=[])
    assert answer.output_text == "42" and [m.role for m in here.seen[2].messages] == ["system", "user"]


@placed()
async def test_the_anthropic_client_plain_and_streamed(here):
    tools = [{"name": "calc", "description": "c", "input_schema": {"type": "object", "properties": {}}}]
    client = anthropic_client(here)
    said = [{"role": "user", "content": "6*7?"}]
    answer = await client.messages.create(model="policy", max_tokens=64, messages=said, tools=tools, system="s")
    assert answer.stop_reason == "tool_use" and answer.content[-1].input == {"expression": "6*7"}
    result = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": "42"}
    said += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    async with client.messages.stream(model="policy", max_tokens=64, messages=said, tools=tools) as stream:
        final = await stream.get_final_message()
    assert final.content[0].text == "42" and final.stop_reason == "end_turn"
    assert [message.role for message in here.seen[1].messages] == ["user", "assistant", "tool"]
    with pytest.raises(anthropic.BadRequestError, match="context is full"):
        await client.messages.create(model="p", max_tokens=9, messages=[{"role": "user", "content": "too long"}])


@placed()
async def test_token_ids_in_and_out(here):
    answer = (await here.post("/inference/v1/generate", {"token_ids": [1, 2, 3]})).json()
    choice = answer["choices"][0]
    assert (choice["token_ids"], choice["weight_versions"]) == ([10, 11, 12], [4, 4, 4])
    assert choice["logprobs"]["content"][0]["logprob"] == -0.5
    assert here.seen[0].token_ids == (1, 2, 3)


@pytest.mark.parametrize(("change", "param"), [
    ({"n": 2}, "n"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
    ({"response_format": {"type": "json_schema", "json_schema": {"strict": True}}}, "response_format"),
    ({"tools": "calc"}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"stop": [""]}, "stop"),
])  # fmt: skip
@placed()
async def test_what_is_refused_names_its_field(here, change, param):
    answer = await here.post("/v1/chat/completions", CHAT | change)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert not here.seen


@placed()
async def test_tokens_bodies_and_ends(here):
    path = "/v1/chat/completions"
    assert (await here.client.post(f"{here.base}/t/unknown{path}", json=CHAT)).status_code == 401
    assert (await here.client.post(f"{here.base}/nothing", json=CHAT)).status_code == 404
    for headers in ({"authorization": f"Bearer {here.token}"}, {"x-api-key": here.token}):
        assert (await here.client.post(here.base + path, json=CHAT, headers=headers)).status_code == 200
    huge = await here.client.post(here.url + path, content=b'{"a": "' + b"x" * MAX_BODY_BYTES + b'"}')
    assert huge.status_code == 413
    for body in (b"no", b"[1]", b"[" * 100_000, b'{"messages": ' + b"[" * 70 + b"]" * 70 + b"}"):
        answer = await here.client.post(here.url + path, content=body)
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    odd = json.dumps(CHAT | {"messages": [{"role": "user", "content": "a\x00b\ud800"}]})
    await here.client.post(here.url + path, content=odd)
    assert here.seen[-1].messages[0].text == "a\ufffdb\ufffd", "only what can be stored comes in"
    assert (await here.post("/reward", {"reward": "high"})).status_code == 400
    assert (await here.post("/reward", {"reward": 0.5})).json() == {"reward": 0.5}
    assert here.session.reward == 0.5
    assert (await here.post("/end", {"result": "done"})).status_code == 200
    ended = await here.post(path, CHAT)
    assert ended.status_code == 409
    here.gateway.drop(here.token, "it has ended")
    assert (await here.post(path, CHAT)).status_code == 409


@placed(script=False)
async def test_a_retry_joins_what_is_under_way_and_replays_what_was_answered(here):
    first = asyncio.create_task(here.post("/v1/chat/completions", CHAT))
    pending = await taken(here)
    retry = asyncio.create_task(here.post("/v1/chat/completions", CHAT, **{"x-stainless-retry-count": "1"}))
    while pending.waiting < 2:
        await here.session.news.get()
    here.session.answered(pending, made(Message("assistant", "one"), 1))
    answers = [(await each).json()["id"] for each in (first, retry)]
    again = await here.post("/v1/chat/completions", CHAT, **{"x-stainless-retry-count": "2"})
    assert [*answers, again.json()["id"]] == ["chatcmpl-t-1"] * 3
    other = asyncio.create_task(here.post("/v1/chat/completions", CHAT))  # no retry: another sample
    here.session.answered(await taken(here), made(Message("assistant", "two"), 2))
    assert (await other).json()["id"] == "chatcmpl-t-2"


@pytest.mark.parametrize(("path", "stream"), [("/v1/chat/completions", False), ("/v1/messages", True)])
@placed(script=False, heartbeat_s=0.02)
async def test_a_client_that_waits_gets_signs_of_life(here, path, stream):
    body = {"model": "p", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "stream": stream}
    async with here.client.stream("POST", here.url + path, json=body) as answer:
        pending = await taken(here)
        chunks = answer.aiter_text()
        alive = [await anext(chunks) for _ in range(3)]
        assert all(each.strip() in ("", ": waiting", 'event: ping\ndata: {"type": "ping"}') for each in alive)
        here.session.answered(pending, made(Message("assistant", "late")))
        rest = "".join([chunk async for chunk in chunks])
    assert "late" in rest
    if not stream:
        json.loads("".join(alive) + rest)


@placed()
async def test_hostile_bodies_paths_and_numbers_are_refused_in_words(here):
    path, post = "/v1/chat/completions", here.client.post
    plain = json.dumps(CHAT | {"model": "M"}).encode()
    other = plain.decode().replace('"M"', '"\\ud800"').encode("utf-16")
    for body in (plain.replace(b'"M"', b'"\xed\xa0\x80"'), other):
        assert (await post(here.url + path, content=body)).status_code == 400, "only UTF-8 can be checked"
    assert (await post(f"{here.base}/t/a%3Fb{path}", json=CHAT)).status_code == 401
    large = await post(here.url + "/reward", content=b'{"reward": 1' + b"0" * 400 + b"}")
    assert large.status_code == 400 and len(large.text) < 500
    called = {"id": "c", "function": {"name": "calc", "arguments": '{"a": "\\ud800"}'}}
    said = [*CHAT["messages"], {"role": "assistant", "tool_calls": [called]}, {"role": "tool", "content": "1"}]
    assert (await here.post(path, CHAT | {"messages": said})).status_code == 200
    assert here.seen[-1].messages[1].calls[0].arguments == '{"a":"\ufffd"}', "text in text, too"
    called["function"] = {"name": "calc", "arguments": "[" * 300 + "]" * 300}
    deep = await here.post(path, CHAT | {"messages": said})
    assert deep.status_code == 400 and deep.json()["error"]["param"] == "arguments"
    template = await here.post(path, CHAT | {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}})
    assert template.status_code == 400 and template.json()["error"]["param"] == "chat_template_kwargs"


@placed(script=False, heartbeat_s=0.02)
async def test_a_client_that_goes_while_it_gets_signs_of_life_is_not_answered(here):
    url = f"{here.url}/v1/chat/completions"
    async with here.client.stream("POST", url, json=CHAT | {"stream": True}) as answer:
        pending = await here.session.news.get()
        await anext(answer.aiter_text())
    assert (await here.session.news.get()) is pending and pending.waiting == 0
    other = asyncio.create_task(here.post("/v1/chat/completions", CHAT | {"max_tokens": 5}))
    next_one = await taken(here)
    assert next_one.request.max_tokens == 5, "the one that was given up is dropped"
    here.session.answered(next_one, made(Message("assistant", "x")))
    assert (await other).status_code == 200 and here.gateway.counts["gone"] == 1
