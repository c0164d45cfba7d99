"""A loop around the anthropic client: whole answers, or streamed ones."""

import json
import sys

import anthropic

SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS = [{"name": "calc", "description": "Compute.", "input_schema": SCHEMA}]


def ask(client, mode, said):
    asked = {"model": "policy", "max_tokens": 512, "messages": said, "tools": TOOLS, "system": "Be brief."}
    if mode == "plain":
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        return stream.get_final_message()


def main(mode):
    client, said = anthropic.Anthropic(), [{"role": "user", "content": "6*7?"}]
    while (answer := ask(client, mode, said)).stop_reason == "tool_use":
        calls = [block.id for block in answer.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call, "content": "42"} for call in calls]
        said += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    return answer.content[-1].text


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))  # noqa: T201 - its result
