"""What `specc compile` says at its end and while it works."""

from __future__ import annotations

import dataclasses
import datetime
import io
import json
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from specc.artifact.directory import read_manifest
from specc.cli import render
from specc.cli.build_engine import next_step
from specc.cli.main import app
from specc.cli.progress import Lines, count_text
from specc.compiler.build import build
from specc.config import CompileConfig
from specc.errors import SpeccError, UnsupportedAttentionError
from specc.progress import ProgressEvent
from tests.command_line import invoke

PASSES = [
    {"program": "target", "pass": "FuseQKV", "rewrites": 8, "declined": []},
    {"program": "target", "pass": "Normalize", "rewrites": 100, "declined": []},
    {
        "program": "draft_0",
        "pass": "FuseQKV",
        "rewrites": 1,
        "declined": [{"node": "a", "reason": "no bias"}, {"node": "b", "reason": "no bias"}],
    },
]


def test_rewrites_are_one_line_a_model():
    assert render.rewrite_lines(PASSES) == [
        "target: 108 rewrites by 2 passes",
        "draft_0: 1 rewrites by 1 passes, 2 declined",
        "  FuseQKV on draft_0: 2 × no bias",
    ]


@pytest.mark.parametrize(
    ("changes", "has_gpu", "words"),
    [
        ({}, False, "specc run out/e "),
        (
            {"backend": "tensorrt", "device": "cuda"},
            False,
            "copy out/e to a machine with an NVIDIA",
        ),
        (
            {"backend": "cuda", "device": "cuda"},
            False,
            "copy out/e to a machine with an NVIDIA GPU",
        ),
        ({"backend": "tensorrt", "device": "cuda"}, True, "specc run out/e "),
    ],
)
def test_the_next_step_works_here(tiny_engine, changes, has_gpu, words):
    manifest = dataclasses.replace(read_manifest(tiny_engine), **changes)
    assert next_step(manifest, Path("out/e"), has_gpu).startswith(words)


def test_the_next_step_without_a_tokenizer_or_in_a_type_that_onnxruntime_lacks(tiny_engine):
    manifest = read_manifest(tiny_engine)
    tokens = dataclasses.replace(manifest.tokenizer, file=None)
    without = dataclasses.replace(manifest, tokenizer=tokens)
    assert next_step(without, Path("e"), False) == "specc inspect e"
    model = dataclasses.replace(manifest.models[0], dtype="bfloat16")
    brain = dataclasses.replace(manifest, backend="onnx", models=(model,))
    assert next_step(brain, Path("e"), False).endswith("--backend eager")


class Bidirectional(nn.Module):
    """A module of somebody's own that is not causal."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, 16), nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, input_ids, position_ids):
        x = (self.tokens(input_ids) + self.places(position_ids))[:, None]
        return self.head(nn.functional.scaled_dot_product_attention(x, x, x)[:, 0])


class Untraceable(Bidirectional):
    def forward(self, input_ids, position_ids):
        if position_ids.sum().item() > 3:
            return self.head(self.tokens(input_ids))
        return self.head(self.tokens(input_ids) * 2)


@pytest.mark.parametrize(
    ("module", "kind"),
    [(Bidirectional, UnsupportedAttentionError), (Untraceable, SpeccError)],
)
def test_the_author_of_a_module_is_told_to_change_it(module, kind, tmp_path):
    with pytest.raises(kind) as caught:
        build(module(), None, tmp_path / "engine", CompileConfig(probe=False))
    assert caught.value.do.startswith("change ")
    assert module.__name__ in caught.value.do


def lines_of(events: list[tuple[float, ProgressEvent]], capsys) -> list[str]:
    """What a log gets of events at these seconds."""
    times = [0.0]
    with Lines(lambda: times[-1]) as listen:
        for at, event in events:
            times.append(at)
            listen(event)
    return capsys.readouterr().err.splitlines()


def test_a_log_says_how_far_a_long_phase_is(capsys):
    """Every ten seconds at most, and no more than a step of a tenth is worth."""
    name, other = "compile programs", "write target weights"
    counted = [(float(at), ProgressEvent(other, at << 30, 100 << 30)) for at in range(20, 100)]
    assert lines_of(
        [
            (0.0, ProgressEvent(name)),
            (1.0, ProgressEvent(name, 1, 3, what="one")),
            (12.0, ProgressEvent(name, 2, 3, what="two")),
            (13.0, ProgressEvent(name, 3, 3)),
            (13.0, ProgressEvent(name, seconds=13.0)),
            (19.0, ProgressEvent(other)),
            *counted,
            (100.0, ProgressEvent(other, seconds=80.0)),
        ],
        capsys,
    ) == [
        "compile programs … 2 of 3, two, about 6 s left … 13.0 s",
        "write target weights … 29%, about 20 s left … 39%, about 30 s left"
        " … 50%, about 30 s left … 61%, about 30 s left … 72%, about 20 s left"
        " … 83%, about 10 s left … 93%, about 6 s left … 80.0 s",
    ]


def test_a_log_says_of_a_slow_phase_that_it_goes_on(capsys):
    """An hour of it, a per cent in 36 s: a line grows every minute, not every per cent."""
    events = [(36.0 * n, ProgressEvent("tune", n, 100)) for n in range(1, 100)]
    (line,) = lines_of(
        [(0.0, ProgressEvent("tune")), *events, (3600.0, ProgressEvent("tune", seconds=3600.0))],
        capsys,
    )
    parts = line.split(" … ")
    assert parts[1:3] == ["2 of 100, about 59 min left", "4 of 100, about 58 min left"]
    assert parts[-2:] == ["98 of 100, about 70 s left", "3600.0 s"]
    assert len(parts) == 51


def test_bars_say_what_is_measured_and_how_long_it_takes():
    assert count_text(0, 8, 0.0, "chain-4") == "0 of 8, chain-4"
    assert count_text(2, 8, 100.0, "chain-4") == "2 of 8, chain-4, about 5 min left"
    assert count_text(1, 8, 1800.0) == "1 of 8, about 3 h 30 min left"
    # nobody knows yet, or nothing is left
    assert count_text(1, 8, 1.0) == "1 of 8"
    assert count_text(8, 8, 100.0) == "8 of 8"


def words_at(width: int, *tables) -> str:
    """Everything that tables say on a terminal of this width, without white space."""
    console = Console(file=io.StringIO(), width=width)
    for table in tables:
        console.print(table)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return "".join(sorted("".join(lines).replace(" ", "")))


def test_no_table_loses_anything_at_80_columns(tiny_engine):
    manifest = read_manifest(tiny_engine)
    long = dataclasses.replace(
        manifest.models[0], architecture="Qwen3OmniMoeThinkerForCausalLM", num_parameters=8 * 10**9
    )
    manifest = dataclasses.replace(manifest, models=(long, *manifest.models[1:]))
    passes = json.loads((tiny_engine / "report.json").read_text())["passes"]

    def tables():
        return (
            render.models_table(manifest),
            render.layers_table(manifest.models),
            render.memory_table(manifest),
            render.passes_table(passes),
        )

    assert words_at(80, *tables()) == words_at(300, *tables())


@pytest.mark.parametrize("command", [("doctor",), ("inspect",)])
def test_commands_heed_the_width(command, tiny_engine, monkeypatch):
    arguments = [*command, *([str(tiny_engine)] if command == ("inspect",) else [])]
    letters = []
    for width in ("80", "300"):
        monkeypatch.setenv("COLUMNS", width)
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0
        # what doctor counts, such as free memory, changes from one call to the next
        words = re.sub(r"[\d.]", "", "".join(result.stdout.split()))
        letters.append("".join(sorted(words)))
    assert letters[0] == letters[1]


def test_inspect_begins_with_what_an_engine_is(tiny_engine, tmp_path, monkeypatch):
    """No line is broken, and passes come last, without those that had nothing to do."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = invoke("inspect", tiny_engine).stdout.splitlines()
    (created,) = [line for line in lines if line.startswith("created ")]
    datetime.datetime.fromisoformat(created.removeprefix("created "))
    headings = ["model ", "plan ", "memory", "probe: ", "files", "passes"]
    places = [next(i for i, line in enumerate(lines) if line.startswith(one)) for one in headings]
    assert places == sorted(places)
    assert "sampling defaults: none of the checkpoint's own" in lines
    passes = json.loads((tiny_engine / "report.json").read_text())["passes"]
    idle = [item for item in passes if not item["rewrites"] and not item["declined"]]
    rows = lines[
        places[-1] + 2 : lines.index(f"{len(idle)} more had nothing to do (--why shows them)")
    ]
    assert len(rows) == len(passes) - len(idle) > 0
    every = invoke("inspect", tiny_engine, "--why").stdout
    assert every.count("\nnormalize ") == sum(item["phase"] == "normalize" for item in passes)
    one = invoke("inspect", tiny_engine, "--pass", idle[0]["pass"]).stdout
    assert idle[0]["pass"] in one
    own = Path(shutil.copytree(tiny_engine, tmp_path / "engine"))
    (own / "generation_config.json").write_text('{"temperature": 0.6}')
    assert "sampling defaults of the checkpoint's generation_config.json: temperature=0.6" in (
        invoke("inspect", own).stdout
    )


def test_inspect_names_unread_and_infinite_weights(tiny_engine):
    manifest = read_manifest(tiny_engine)
    model = dataclasses.replace(
        manifest.models[0], nonfinite_weights=3, unread_tensors=("visual.a", "visual.b")
    )
    lines = render.weight_lines(dataclasses.replace(manifest, models=(model,)))
    assert lines == [
        "target holds 3 weights that are not finite",
        "target does not read these tensors of its checkpoint: visual.a, visual.b",
    ]
