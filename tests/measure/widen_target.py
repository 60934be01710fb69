"""Widen a trained target to a realistic size without changing what it computes.

    python tests/measure/widen_target.py --source examples/pair/target --parameters 100M \
        --output OUT

A measurement of speculative decoding needs two things at once: a draft that the target really
agrees with, which takes training, and a target that is expensive to run, which takes size. This
script adds only the size. The target gets more feed-forward columns and more layers; what is added
has random weights of the trained ones' spread, except for the matrices that write into the
residual stream (`o_proj`, and `down_proj` at the new columns), which are zero. The sums are the
same, so the output is, up to the rounding of longer sums; the script loads what it wrote and
compares. Arithmetic takes as long with a zero as without, so a pass costs what it would in a
trained model of that size.

Shape: the hidden size stays, because the mean inside a norm would notice another one. From
`--parameters` the script takes the most layers, up to 24, with which the total can be met
within 2 % by an intermediate size that is a multiple of 64. 24 is about what published models of
100M to 1B parameters have. With the hidden size of the demo target that leaves a feed-forward
block wider than in those models: weights to read, as in a large model, rather than a hundred
small layers whose cost would be the overhead of calling them.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# one thread: the spread of the weights rounds the same way everywhere, so a seed is enough
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

# families whose blocks add o_proj(attention) and down_proj(act(gate_proj) * up_proj), and no more
FAMILIES = ("llama", "qwen3")
MAX_LAYERS = 24
COLUMN_MULTIPLE = 64
SIZE_TOLERANCE = 0.02
LOGIT_TOLERANCE = 1e-4
PROMPT_LENS = (1, 16, 128)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# what a checkpoint holds besides its weights and config.json
SIDE_FILES = ("generation_config.json", "tokenizer*", "*_tokens*.json", "vocab.*", "merges.txt")
SIDE_FILES += ("chat_template*",)


@dataclass(frozen=True)
class Size:
    """What widening changes in a model."""

    num_layers: int
    intermediate_size: int


@dataclass(frozen=True)
class ParameterCount:
    """How the number of parameters follows from the size.

    Args:
        fixed: parameters outside the layers; a tied head counts once.
        per_layer: parameters of a layer without its feed-forward columns.
        per_column: parameters of one feed-forward column.
    """

    fixed: int
    per_layer: int
    per_column: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> ParameterCount:
        """Count a model's parameters; all of its layers have one shape."""
        columns = model.config.intermediate_size
        fixed = layer = per_column = 0
        for name, parameter in model.named_parameters():
            index = layer_index(name)
            if index is None:
                fixed += parameter.numel()
            elif index == 0:
                layer += parameter.numel()
                if re.search(r"(gate|up)_proj|down_proj\.weight", name):
                    per_column += parameter.numel() // columns
        return cls(fixed, layer - per_column * columns, per_column)

    def total(self, size: Size) -> int:
        layer = self.per_layer + self.per_column * size.intermediate_size
        return self.fixed + size.num_layers * layer


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="the trained model")
    parser.add_argument("--output", type=Path, required=True, help="a directory to make")
    parser.add_argument("--parameters", type=parse_number, required=True, help="such as 100M")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    options = parser.parse_args(arguments)
    transformers_logging.disable_progress_bar()
    options.output.mkdir(parents=True)
    trained = load(options.source)
    config = trained.config
    kinds = {*(getattr(config, "layer_types", None) or ("full_attention",))}
    if config.model_type not in FAMILIES or kinds != {"full_attention"}:
        sys.exit(
            f"{options.source}: {config.model_type}; needed: {', '.join(FAMILIES)}, no windows"
        )
    count = ParameterCount.of(trained)
    before = Size(config.num_hidden_layers, config.intermediate_size)
    size = fit_size(count, before, options.parameters)
    for what, one in (("source", before), ("widened", size)):
        print(
            f"{what:<10}{config.model_type}, {count.total(one):,} parameters, {one.num_layers}"
            f" layers, intermediate size {one.intermediate_size}, hidden size {config.hidden_size}",
            flush=True,
        )
    build_widened(trained, size, options.seed).to(DTYPES[options.dtype]).save_pretrained(
        options.output
    )
    for pattern in SIDE_FILES:
        for file in options.source.glob(pattern):
            shutil.copyfile(file, options.output / file.name)
    verify(trained, load(options.output), options.seed)


def load(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def fit_size(count: ParameterCount, before: Size, parameters: int) -> Size:
    """The size of most layers, up to 24, with so many parameters within 2 %."""
    for num_layers in range(max(before.num_layers, MAX_LAYERS), before.num_layers - 1, -1):
        free = parameters - count.total(Size(num_layers, 0))
        exact = free / (num_layers * count.per_column)
        columns = round(exact / COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        size = Size(num_layers, max(columns, before.intermediate_size))
        if abs(count.total(size) / parameters - 1) <= SIZE_TOLERANCE:
            return size
    sys.exit(f"--parameters {parameters:,}: no number of layers and columns has so many")


def build_widened(trained: PreTrainedModel, size: Size, seed: int) -> PreTrainedModel:
    """Return a model of this size, in float32, that computes what the trained one does.

    The first layer of each run of layers is a trained one, the donor of the run; the new ones after
    it have the spread of its weights, and add zero.
    """
    config = copy.deepcopy(trained.config)
    donors = [i * config.num_hidden_layers // size.num_layers for i in range(size.num_layers)]
    config.num_hidden_layers, config.intermediate_size = size.num_layers, size.intermediate_size
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[donor] for donor in donors]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    old = dict(trained.named_parameters())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            index, is_new = layer_index(name), False
            if index is not None:
                is_new = index > 0 and donors[index] == donors[index - 1]
                name = name.replace(f".layers.{index}.", f".layers.{donors[index]}.")
            parameter.copy_(widen(name, old[name], parameter.shape, is_new, generator))
    return model.eval()


def widen(
    name: str, old: Tensor, shape: torch.Size, is_new: bool, generator: torch.Generator
) -> Tensor:
    """The value of a parameter of this shape; `is_new`: of a new layer, whose donor has `old`."""
    if ".o_proj." in name or ".down_proj." in name:
        new = torch.zeros(shape)  # a bias too: nothing of it may reach the residual stream
    else:
        # neither zero nor denormal, so that arithmetic on them takes its usual time
        new = torch.randn(shape, generator=generator) * old.std(correction=0) + old.mean()
    if not is_new:
        new[tuple(slice(length) for length in old.shape)] = old
    return new


def layer_index(name: str) -> int | None:
    match = re.search(r"\.layers\.(\d+)\.", name)
    return int(match.group(1)) if match else None


@torch.inference_mode()
def verify(trained: PreTrainedModel, widened: PreTrainedModel, seed: int) -> None:
    """Exit with an error where logits of both models, in float32, differ by more than rounding."""
    generator = torch.Generator().manual_seed(seed)
    difference = 0.0
    for length in PROMPT_LENS:
        shape = (1, min(length, trained.config.max_position_embeddings))
        ids = torch.randint(trained.config.vocab_size, shape, generator=generator)
        want, got = (model(ids, use_cache=False).logits for model in (trained, widened))
        found = float((want - got).abs().max())
        if not found <= LOGIT_TOLERANCE:  # so that NaN fails
            sys.exit(f"logits differ by {found:.1e}; bfloat16 may round the source's weights")
        difference = max(difference, found)
    print(f"{'equality':<10}logits differ by {difference:.1e} at most")


def parse_number(text: str) -> int:
    """Read a number of parameters: `100M`, `1.5B`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 100M or 1.5B")
    return round(float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9}[match[2]])


if __name__ == "__main__":
    main()
