"""An agent without any package, for environments that have none: as a function, and as a command."""

import json
import os
import sys
import urllib.request


def run(messages, base_url):
    """One turn; the model's text, and which Python this is."""
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
    return {"text": text, "prefix": sys.prefix, "venv": os.environ.get("VIRTUAL_ENV", ""), "reward": 0.5}


if __name__ == "__main__":
    task = json.load(sys.stdin)
    print(f"working on {task['trajectory']}, {task['prompt_id']}")  # noqa: T201 - what it prints is its result
    if sys.argv[1:] == ["fails"]:
        sys.exit("no way")
    print(json.dumps(run(task["messages"], os.environ["OPENAI_BASE_URL"])))  # noqa: T201
