"""`examples/two_hosts.py`: two ranks, or two stages, in two network namespaces, by torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from tests import models
from tests.lossless import Zoo
from tests.runtime.ranks.test_stages import staged_path

EXAMPLE = Path(__file__).parents[3] / "examples" / "two_hosts.py"


def refusal() -> str | None:
    """Why this machine makes no network namespaces; None where it does."""
    name = "specc-test-netns"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    except OSError as error:
        return str(error)
    return made.stderr.strip() or None


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=["two-ranks", "two-stages"])
def test_two_namespaces_generate_what_one_process_does(
    zoo: Zoo, tmp_path: Path, shape: tuple[int, int]
) -> None:
    if (why := refusal()) is not None:
        pytest.skip(f"no network namespaces here: {why}")
    path, given = staged_path(zoo, *shape), models.prompts()[1]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": given}) + "\n", encoding="utf-8")
    options = ["--prompts", str(prompts), "--max-tokens", "12", "--ignore-eos", "--json"]
    run = subprocess.run(
        [sys.executable, str(EXAMPLE), str(path), *options, "--plan", "tree-3-2-1"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    llm = LLM(staged_path(zoo, 1, 1), plan="tree-3-2-1")
    (wanted,) = llm.generate([given], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    found = json.loads(run.stdout)["outputs"][0]["token_ids"]
    assert found == list(wanted.outputs[0].token_ids)
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert "specc-" not in left


def test_the_commands_are_those_of_two_hosts() -> None:
    """Without an engine: what is printed is what is run, and it differs in the rank of the host."""
    sys.path.insert(0, str(EXAMPLE.parent))
    try:
        from two_hosts import command
    finally:
        sys.path.remove(str(EXAMPLE.parent))
    first, second = (command(node, "10.0.0.1", ["engine/", "Once"]) for node in (0, 1))
    assert [a for a, b in zip(first, second, strict=True) if a != b] == ["0"]
    assert first[1:3] == ["-m", "torch.distributed.run"]
    assert first[-5:] == ["-m", "specc", "run", "engine/", "Once"]
