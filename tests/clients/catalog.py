"""Which clients there are, what each of them tries, and how it is run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.clients.environment import HERE, node_with, python_with, versions_in

# in the order of the table's columns
FEATURES = ("chat", "stream", "tools", "schema", "responses", "messages")
# a guard: all take seconds on a quiet machine
SECONDS = 1800
# client → what is wrong with it, and not with the server; each is looked at anew when versions rise
KNOWN: dict[tuple[str, str], str] = {}
# package → why the suite leaves it out
LEFT_OUT = {
    "guidellm": "needs torch, which is gigabytes for a load of a few requests",
    "vLLM's `vllm bench serve`": "comes with all of vLLM alone",
}


@dataclass(frozen=True)
class Client:
    """One package that others use to talk to a server.

    Args:
        name: in the table.
        packages: that it is, in versions that were run; they want different versions of what they
            need, and so each client has a place of its own.
        script: of this folder.
        features: that it tries.
    """

    name: str
    packages: tuple[str, ...]
    script: str
    features: tuple[str, ...]

    @property
    def is_node(self) -> bool:
        return self.script.endswith(".mjs")

    @property
    def names(self) -> list[str]:
        """Of its packages, without versions."""
        return [re.split(r"(?<=.)@|\[|==", package)[0] for package in self.packages]


_CHATS = ("chat", "stream", "tools", "schema")
_MESSAGES = ("messages", "stream", "tools", "schema")
CLIENTS = (
    Client("openai", ("openai==3.54.0",), "openai_client.py", (*_CHATS, "responses")),
    Client("openai (npm)", ("openai@6.49.0",), "openai_client.mjs", (*_CHATS, "responses")),
    Client("anthropic", ("anthropic==2.14.0",), "anthropic_client.py", _MESSAGES),
    Client("anthropic (npm)", ("@anthropic-ai/sdk@1.14.0",), "anthropic_client.mjs", _MESSAGES),
    Client("litellm", ("litellm==1.110.2",), "litellm_client.py", FEATURES),
    Client("langchain-openai, langchain-anthropic",
           ("langchain-openai==1.7.4", "langchain-anthropic==1.7.10"), "langchain_client.py",
           FEATURES),
    Client("llama-index-llms-openai-like", ("llama-index-llms-openai-like==0.8.1",),
           "llama_index_client.py", _CHATS),
    Client("instructor", ("instructor==1.17.0",), "instructor_client.py",
           ("stream", "tools", "schema", "responses")),
    Client("pydantic-ai", ("pydantic-ai-slim[openai,anthropic]==2.68.0",), "pydantic_ai_client.py",
           FEATURES),
    Client("llm", ("llm==0.36",), "llm_client.py", _CHATS),
    Client("ollama", ("ollama==0.6.3",), "ollama_client.py", _CHATS),
    Client("aiperf", ("aiperf==0.13.0",), "aiperf_client.py",
           ("chat", "stream", "responses", "messages")),
    Client("Codex (npm)", ("@openai/codex@0.171.0",), "codex_client.mjs",
           ("tools", "schema", "responses")),
    Client("Claude Code (npm)", ("@anthropic-ai/claude-code@2.1.328",), "claude_code_client.mjs",
           _MESSAGES),
)  # fmt: skip


def versions_of(client: Client) -> str:
    """Of its packages, as they are installed."""
    home, _ = _home_of(client)
    found = versions_in(home)
    return ", ".join(found.get(name, "missing") for name in client.names)


def run_client(client: Client, url: str) -> dict[str, str]:
    """Install it, if that was not done, and try it; feature → what has failed, "" is nothing."""
    home, missing = _home_of(client)
    if missing:
        reason = "; ".join(f"{name}: {why}" for name, why in missing.items())
        return dict.fromkeys(client.features, reason)
    program = ["node"] if client.is_node else [str(home)]
    script = (home if client.is_node else HERE) / client.script
    try:
        # nothing of this machine's settings and keys
        with tempfile.TemporaryDirectory() as folder:
            environment = {"PATH": os.environ["PATH"], "HOME": folder, "LANG": "C.UTF-8"}
            done = subprocess.run(
                [*program, str(script), url], capture_output=True, text=True, timeout=SECONDS,
                cwd=folder, env=environment,
            )  # fmt: skip
        found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return dict.fromkeys(client.features, f"not done within {SECONDS} s")
    except (ValueError, IndexError):
        lines = done.stderr.strip().splitlines() or ["no output"]
        return dict.fromkeys(client.features, lines[-1][:400])
    return {name: found.get(name, "was not tried") for name in client.features}


def _home_of(client: Client) -> tuple[Path, dict[str, str]]:
    return (node_with if client.is_node else python_with)(client.packages)
