"""Run in the clients' environment: the command `llm`, with a model of its file of others."""

import json
import os
import subprocess
import sys
from pathlib import Path

from report import ANSWER, ASK, MODEL, SCHEMA, URL, WEATHER, run, same

HOME = Path(os.environ["HOME"])
SAID = HOME / "given.json"
FUNCTION = f"""
def weather(city: str, degrees: int) -> str:
    "How warm it is"
    import json
    from pathlib import Path
    Path({str(SAID)!r}).write_text(json.dumps(dict(city=city, degrees=degrees)))
    return str(degrees)
"""
# JSON is YAML
MODELS = [{"model_id": "here", "model_name": MODEL, "api_base": f"{URL}/v1", "supports_tools": True,
           "supports_schema": True, "can_stream": True}]  # fmt: skip


def llm(*arguments):
    command = [Path(sys.executable).with_name("llm"), "-m", "here", "--key", "none", *arguments]
    environment = os.environ | {"LLM_USER_PATH": str(HOME)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise AssertionError(done.stderr.strip()[-300:])
    return done.stdout.strip()


def chat():
    same(llm("--no-stream", "-s", "Be brief.", ASK), ANSWER)


def stream():
    same(llm(ASK), ANSWER)


def tools():
    same(llm("--functions", FUNCTION, ASK), ANSWER)
    same(json.loads(SAID.read_text()), WEATHER)


def schema():
    same(json.loads(llm("--schema", json.dumps(SCHEMA), ASK)), WEATHER)


if __name__ == "__main__":
    (HOME / "extra-openai-models.yaml").write_text(json.dumps(MODELS))
    run(chat=chat, stream=stream, tools=tools, schema=schema)
