"""`--calibration`: weights are rounded for what they multiply, in the order of the layers."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specc.artifact.error_feedback import round_with_feedback
from specc.artifact.quantized_layout import QuantizedLayout, dequantize
from specc.compiler.build import build
from specc.compiler.calibration import calibration_windows
from specc.config import CompileConfig
from specc.errors import ConfigError, InputFileError
from specc.passes.quantize import calibrate
from specc.runtime.backends.program_files import read_json
from tests.command_line import invoke
from tests.models import save_tiny

LENGTH = 64


def text(seed: int, length: int) -> str:
    own = random.Random(seed)
    return "".join(own.choice("abcdefgh ij klmn") for _ in range(length))


def config(**more: Any) -> CompileConfig:
    return CompileConfig(
        plans=(), backend="eager", max_seq_len=LENGTH, max_batch_size=2, probe=False, **more
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A checkpoint, texts, and its engine rounded for them."""
    root = tmp_path_factory.mktemp("calibration")
    save_tiny("llama", root / "target")
    (root / "texts.txt").write_text(text(1, 3000))
    (root / "others.txt").write_text(text(2, 1500))
    given = config(quantize="int4", quantize_group=32, calibration=root / "texts.txt")
    build(root / "target", None, root / "calibrated", given)
    return root


def weights_of(engine: Path) -> dict[str, tuple[str, torch.Tensor]]:
    """Parameters, joined by +, with the layout and the values [N, K] that an engine has."""
    held = load_file(engine / "target" / "weights.safetensors")
    found = {}
    for entry in read_json(engine / "target" / "program.json")["inputs"]:
        if "quantized_of" in entry:
            names, _, layout = entry["key"].rpartition(":")
            shape = entry["quantized_of"]
            value = dequantize(held[entry["key"]], shape, QuantizedLayout.named(layout))
            found[names] = layout, value
    return found


def test_weights_are_rounded_for_the_rows_that_come_to_them(made) -> None:
    """Rows as transformers has them, in a model whose earlier projections are rounded."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(made / "target", dtype=torch.float32).eval()
    data = (made / "target" / "tokenizer.json").read_bytes()
    windows = calibration_windows(made / "texts.txt", data, None, None, LENGTH)
    assert len(windows) == 32
    assert {len(window) for window in windows} <= {LENGTH}
    held = weights_of(made / "calibrated")
    # all but the head and the table of tokens
    assert sum(layout.startswith("int4-g32") for layout, _ in held.values()) == len(held) - 2
    checked = 0
    for names, (layout, value) in list(held.items()):
        if layout == "int8":
            continue
        first, *_ = names.split("+")
        rows: list[torch.Tensor] = []
        hook = model.get_submodule(first.removesuffix(".weight")).register_forward_pre_hook(
            lambda module, args, rows=rows: rows.append(args[0][0])
        )
        with torch.inference_mode():
            for window in windows:
                model(torch.tensor([window]))
        hook.remove()
        x = torch.cat(rows).double()
        parameters = [model.get_parameter(name) for name in names.split("+")]
        weight = torch.cat([item.detach() for item in parameters])
        named = QuantizedLayout.named(layout)
        want = round_with_feedback(weight, (x.T @ x).float(), named).values(named)
        # sums of rows in another order round a few values to their other neighbor
        assert ((want - value).abs() < 1e-5).float().mean() > 0.95, names
        lost = [((weight - item).double() @ x.T).square().sum() for item in (value, want)]
        assert float(lost[0]) == pytest.approx(float(lost[1]), rel=0.05)
        # what follows sees this projection as the engine has it
        for parameter, part in zip(
            parameters, value.split([len(p) for p in parameters]), strict=True
        ):
            parameter.data = part
        checked += 1
    assert checked == len(held) - 2 > 4


@pytest.mark.slow
def test_texts_of_the_same_kind_lose_less(made) -> None:
    build(made / "target", None, made / "rounded", config(quantize="int4", quantize_group=32))
    build(made / "target", None, made / "float", config())
    found = {}
    for name in ("rounded", "calibrated"):
        given = ("compare", made / name, "--texts", made / "others.txt")
        result = invoke(*given, "--against", made / "float", "--json")
        found[name] = json.loads(result.stdout)["against"]["kl_mean"]
    assert found["calibrated"] < 0.8 * found["rounded"]


@pytest.mark.slow
def test_states_of_the_trained_hybrid(tmp_path) -> None:
    """It is rounded for texts, all but the head, the table of tokens and narrow projections."""
    root = Path(__file__).parents[3]
    target = root / "examples" / "hybrid" / "target"
    texts = tmp_path / "texts.txt"
    texts.write_text((root / "README.md").read_text(encoding="utf-8"))
    given = config(quantize="int4", quantize_group=32, calibration=texts)
    told = build(target, None, tmp_path / "calibrated", given).warnings
    assert any("rounded for the texts" in text for text in told)


def test_what_loses_too_much_has_more_bits(made, monkeypatch, tmp_path) -> None:
    """A limit between what projections lose: those above it have 8 bits, and the user is told."""
    monkeypatch.setattr(calibrate, "MOST_LOST", 0.0)
    given = config(quantize="int4", quantize_group=32, calibration=made / "texts.txt")
    told = build(made / "target", None, tmp_path / "all", given).warnings
    layouts = {name: layout for name, (layout, _) in weights_of(tmp_path / "all").items()}
    projections = [item for item in layouts.items() if item[1] != "int8"]
    assert len(projections) == len(layouts) - 2, "the head and the table of tokens"
    assert {layout for _, layout in projections} == {"int8-g32"}
    (line,) = (text for text in told if "rounded for the texts" in text)
    losses = {name: float(value) for name, value in re.findall(r"(\S+) \(([\d.]+)% in 4\)", line)}
    assert list(losses) == [name for name, _ in projections]
    limit = sorted(losses.values())[len(losses) // 2]
    monkeypatch.setattr(calibrate, "MOST_LOST", (limit + 0.05) / 100)
    build(made / "target", None, tmp_path / "some", given)
    found = {name: layout for name, (layout, _) in weights_of(tmp_path / "some").items()}
    # what comes later sees other rows, and the first one does not
    first = projections[0][0]
    assert (found[first] == "int8-g32") == (losses[first] > limit + 0.05)
    assert {"int8-g32", "int4-g32-zeros"} <= set(found.values())


def test_windows_come_from_all_over_the_texts(made, tmp_path) -> None:
    file = tmp_path / "texts.jsonl"
    lines = [{"prompt_token_ids": [number] * 30} for number in range(1, 101)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '\n{"prompt": "abc"}\n')
    data = (made / "target" / "tokenizer.json").read_bytes()
    windows = calibration_windows(file, data, 0, None, 21)
    assert len(windows) == 32
    assert windows[0] == [0, *[1] * 20]
    assert all(window[0] == 0 and 2 <= len(window) <= 21 for window in windows)
    numbers = [window[1] for window in windows]
    assert numbers == sorted(numbers)
    assert numbers[-1] > 95


def test_what_is_refused(made, tmp_path) -> None:
    with pytest.raises(ConfigError, match="no --quantize"):
        config(calibration=made / "texts.txt")
    with pytest.raises(ConfigError, match="fp8"):
        config(calibration=made / "texts.txt", quantize="fp8")
    data = (made / "target" / "tokenizer.json").read_bytes()
    file = tmp_path / "texts.jsonl"
    for content, word in (
        (b'{"prompt": 3}', "neither text nor token ids"),
        (b"{", "no JSON"),
        (b'{"prompt_token_ids": [1]}', "no text of two tokens"),
        (b'{"prompt_token_ids": [1, 300]}', "none of the target's"),
        (b"\xff", "0xff at offset 0"),
    ):
        file.write_bytes(content)
        with pytest.raises(InputFileError, match=word):
            calibration_windows(file, data, None, 128, 64)
    with pytest.raises(InputFileError, match="without a tokenizer"):
        calibration_windows(made / "texts.txt", b"", None, 128, 64)
    with pytest.raises(InputFileError, match="No such file"):
        calibration_windows(tmp_path / "none", data, None, 128, 64)
