"""Run in the clients' environment: aiperf, a few requests at a time to each of its endpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path

from report import MODEL, URL, run, same

HOME = Path(os.environ["HOME"])
TOKENIZER = Path(__file__).resolve().parents[2] / "examples" / "pair" / "target"
NUM_REQUESTS = 12


def load(kind, *arguments):
    """Metrics of a load in which no request fails."""
    folder = HOME / "-".join([kind, *arguments]).replace("/", "")
    command = [
        Path(sys.executable).with_name("aiperf"), "profile", "--model", MODEL, "--url", URL,
        "--endpoint-type", kind, "--tokenizer", TOKENIZER, "--request-count", str(NUM_REQUESTS),
        "--concurrency", "4", "--isl", "50", "--osl", "30", "--ui", "none", "--workers-max", "2",
        "--artifact-dir", folder, *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise AssertionError((done.stderr or done.stdout).strip()[-400:])
    found = json.loads((folder / "profile_export_aiperf.json").read_text())
    same((found["request_count"]["avg"], found.get("error_summary")), (NUM_REQUESTS, []))
    return found


def chat():
    load("chat")


def stream():
    found = load("chat", "--streaming", "--use-server-token-count", "--per-chunk-usage")
    assert found["time_to_first_token"]["avg"] > 0
    assert found["inter_token_latency"]["avg"] > 0


def responses():
    load("responses", "--streaming")


def messages():
    load("messages", "--streaming")


if __name__ == "__main__":
    run(chat=chat, stream=stream, responses=responses, messages=messages)
