"""Perplexity of a checkpoint whose projections are rounded in several ways, in float32.

Weights are replaced by what their integers stand for, and transformers runs the model: what
rounding costs, without any engine. `q4_0 of llama.cpp` and the like are its own rules without an
importance matrix, written out; those without these words are specc's.

    python tests/measure/rounding.py CHECKPOINT --texts texts.jsonl --calibration others.jsonl \
        --rules "q4_0 of llama.cpp" int4-g64-zeros "calibrated int4-g64-zeros" --json FILE
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.artifact.error_feedback import round_with_feedback
from specc.artifact.mixes import MIXES
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.rounding import round_weight

CALIBRATED, REFERENCE = "calibrated ", " of llama.cpp"
Rule = Callable[[str, Tensor], Tensor]


def by_layout(name: str) -> Callable[[Tensor], Tensor]:
    layout = QuantizedLayout.named(name)

    def rounded(weight: Tensor) -> Tensor:
        found = round_weight(weight, layout)
        if layout.blocks is not None:
            return layout.blocks.numbers(found.levels, found.scales)
        return found.values(layout)

    return rounded


def simple(weight: Tensor, middle: int) -> Tensor:
    """`quantize_row_q4_0_ref` and, with the middle 16, `q5_0`: ties go up."""
    values = weight.view(len(weight), -1, 32)
    largest = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    scale = largest / -middle
    factor = torch.where(scale == 0, 0, 1 / scale)
    steps = (values * factor + middle + 0.5).floor().clamp(0, 2 * middle - 1) - middle
    return (steps * scale.half().float()).view_as(weight)


def q4_k(weight: Tensor) -> Tensor:
    """`quantize_row_q4_K_ref`: errors count more where weights are large."""
    x = weight.view(len(weight), -1, 8, 32).double()
    own = x.square().mean(-1, keepdim=True).sqrt() + x.abs()
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True)
    spread = torch.where(high > low, high - low, 1)

    def total(values: Tensor) -> Tensor:
        return (own * values).sum(-1, keepdim=True)

    scale, least = spread / 15, low
    level = ((x - low) / scale).round().clamp(0, 15)
    best = total((scale * level + least - x).square())
    for number in range(21):
        level = ((14 + number / 10) / spread * (x - low)).round().clamp(0, 15)
        ones, xs, ls = total(torch.ones_like(x)), total(x), total(level)
        lls, xls = total(level * level), total(x * level)
        divisor = ones * lls - ls * ls
        s, m = (ones * xls - xs * ls) / divisor, (lls * xs - ls * xls) / divisor
        s, m = torch.where(m > 0, xls / lls, s), m.clamp(max=0)
        error = total((s * level + m - x).square())
        is_better = (error < best) & (divisor > 0)
        best = torch.where(is_better, error, best)
        scale, least = torch.where(is_better, s, scale), torch.where(is_better, m, least)
    factors = [item.amax(2, keepdim=True) for item in (scale, -least)]
    parts = [
        (item * 63 / torch.where(most == 0, 1, most)).round().clamp(0, 63)
        * (most / 63).half().double()
        for item, most in zip((scale, -least), factors, strict=True)
    ]
    s, m = parts
    level = ((x + m) / torch.where(s == 0, 1, s)).round().clamp(0, 15)
    return (s * level - m).view_as(weight).float()


def q6_k(weight: Tensor) -> Tensor:
    """`quantize_row_q6_K_ref`: errors are weighted by squares of weights."""
    x = weight.view(len(weight), -1, 16, 16).double()
    own = x.square()
    end = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    end = torch.where(end == 0, 1, end)
    best, scale = torch.full_like(end, -1), torch.zeros_like(end)
    for number in range(-9, 10):
        level = (-(32 + number / 10) / end * x).round().clamp(-32, 31)
        along = (own * x * level).sum(-1, keepdim=True)
        squares = (own * level * level).sum(-1, keepdim=True).clamp(min=1e-30)
        gain = along * along / squares
        scale = torch.where(gain > best, along / squares, scale)
        best = best.maximum(gain)
    most = scale.gather(2, scale.abs().argmax(2, keepdim=True))
    most = torch.where(most == 0, 1, most)
    s = (scale * -128 / most).round().clamp(max=127) * (-most / 128).half().double()
    return (s * (x / torch.where(s == 0, 1, s)).round().clamp(-32, 31)).view_as(weight).float()


_REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "q4_0": lambda weight: simple(weight, 8),
    "q5_0": lambda weight: simple(weight, 16),
    "q4_k": q4_k,
    "q6_k": q6_k,
}


def rule_of(name: str, num_layers: int) -> Rule:
    """What a name says: a layout, a mix, or one as llama.cpp rounds to it."""
    kind = name.removesuffix(REFERENCE)
    is_own = kind == name

    def rounded(parameter: str, weight: Tensor) -> Tensor:
        is_head, layout = not parameter, kind
        if kind in MIXES:
            layout = MIXES[kind].layout(parameter, weight.shape[1], num_layers, is_head)
        elif is_head:
            layout = "int8"
        if not is_own and layout in _REFERENCES:
            return _REFERENCES[layout](weight)
        return by_layout(layout)(weight)

    return rounded


def projections(model: Any) -> dict[str, Any]:
    head = model.get_output_embeddings()
    found = model.named_modules()
    return {
        f"{name}.weight": item
        for name, item in found
        if isinstance(item, torch.nn.Linear) and item is not head
    }


def first_of(model: Any, held: dict[str, Any], waiting: list[str], window: list[int]) -> list[str]:
    """Of projections, those that run first and have one input."""
    seen: list[str] = []
    inputs: list[Tensor] = []

    def note(name: str, x: Tensor) -> None:
        if not inputs or x is inputs[0]:
            seen.append(name)
            inputs.append(x)

    hooks = [
        held[name].register_forward_pre_hook(lambda _, args, name=name: note(name, args[0]))
        for name in waiting
    ]
    model(torch.tensor([window]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def products_at(model: Any, projection: Any, windows: Sequence[list[int]]) -> Tensor:
    """Σ x xᵀ over the rows that come to a projection."""
    total = torch.zeros(projection.in_features, projection.in_features)

    def add(_: Any, args: Any) -> None:
        x = args[0].flatten(0, -2)
        total.add_(x.T @ x)
        raise StopIteration

    hook = projection.register_forward_pre_hook(add)
    for window in windows:
        with contextlib.suppress(StopIteration):
            model(torch.tensor([window]), use_cache=False)
    hook.remove()
    return total


@torch.inference_mode()
def calibrate(model: Any, windows: Sequence[list[int]], layout: QuantizedLayout) -> None:
    """Round projections in the order in which they run, those of one input together."""
    held = projections(model)
    waiting = list(held)
    while waiting:
        group = first_of(model, held, waiting, windows[0])
        products = products_at(model, held[group[0]], windows)
        for name in group:
            weight = held[name].weight
            weight.data = round_with_feedback(weight.data, products, layout).values(layout)
            waiting.remove(name)


@torch.inference_mode()
def perplexity(model: Any, windows: Sequence[list[int]]) -> float:
    loss, count = 0.0, 0
    for window in windows:
        ids = torch.tensor([window])
        logits = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        loss -= float(logits.gather(1, ids[0, 1:, None]).sum())
        count += len(window) - 1
    return math.exp(loss / count)


def windows_of(path: Path, tokenizer: Any, length: int, most: int) -> list[list[int]]:
    """The first tokens of each text."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [tokenizer(json.loads(line)["prompt"]).input_ids[:length] for line in lines]
    return [ids for ids in found if len(ids) > 50][:most]


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--rules", nargs="+", required=True)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--num-windows", type=int, default=40)
    parser.add_argument("--num-calibration", type=int, default=32)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    windows = windows_of(args.texts, tokenizer, args.length, args.num_windows)
    found: dict[str, Any] = {"tokens": sum(len(window) - 1 for window in windows)}
    for name in ("float32", *args.rules):
        model: Any = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32)
        model.eval()
        head = model.get_output_embeddings()
        if name.startswith(CALIBRATED):
            layout = name.removeprefix(CALIBRATED)
            texts = windows_of(args.calibration, tokenizer, args.length, args.num_calibration)
            calibrate(model, texts, QuantizedLayout.named(layout))
            rule = rule_of(layout, model.config.num_hidden_layers)
        elif name != "float32":
            rule = rule_of(name, model.config.num_hidden_layers)
            for parameter, item in projections(model).items():
                item.weight.data = rule(parameter, item.weight.data)
        if name != "float32":
            # of a tied embedding, the head alone
            value = rule("", head.weight.data)
            head.weight = torch.nn.Parameter(value, requires_grad=False)
        found[name] = perplexity(model, windows)
        print(f"{name}: {found[name]:.4f}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
