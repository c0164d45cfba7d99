"""An agent of mini-swe-agent, over litellm, with its own prompts; its commands are run here."""

import json
import os
import pathlib
import tempfile

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors"}
os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = tempfile.mkdtemp()

import minisweagent
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel


def main():
    given = yaml.safe_load((pathlib.Path(minisweagent.__file__).parent / "config" / "default.yaml").read_text())
    place = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"], "drop_params": True}
    model = LitellmModel(**{**given.get("model", {}), "model_name": "openai/policy", "model_kwargs": place})
    agent = DefaultAgent(model, LocalEnvironment(), **{**given["agent"], "step_limit": 8})
    return str(agent.run("Say hi."))


if __name__ == "__main__":
    print(json.dumps(main()))  # noqa: T201 - its result
