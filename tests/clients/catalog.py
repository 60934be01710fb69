"""Which clients there are, what each of them tries, and how it is run."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.clients.environment import HERE, node_with, python_with, versions_in

# in the order of the table's columns
FEATURES = ("chat", "stream", "tools", "schema", "responses", "messages")
SECONDS = 300
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
        done = subprocess.run(
            [*program, str(script), url], capture_output=True, text=True, timeout=SECONDS
        )
        found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return dict.fromkeys(client.features, f"not done within {SECONDS} s")
    except (ValueError, IndexError):
        lines = done.stderr.strip().splitlines() or ["no output"]
        return dict.fromkeys(client.features, lines[-1][:400])
    return {name: found.get(name, "was not tried") for name in client.features}


def _home_of(client: Client) -> tuple[Path, dict[str, str]]:
    return (node_with if client.is_node else python_with)(client.packages)
