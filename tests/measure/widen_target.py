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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# one thread: the spread of the weights rounds the same way everywhere, so a seed is enough
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from specc.errors import ConfigError, NotCausalLMError, OutputError, SpeccError, WeightError
from specc.passes.frontend import hf_model
from specc.system.files import format_bytes, output_error

# families whose blocks add o_proj(attention) and down_proj(act(gate_proj) * up_proj), and no more
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
MAX_LAYERS = 24
COLUMN_MULTIPLE = 64
SIZE_TOLERANCE = 0.02
LOGIT_TOLERANCE = 1e-4
PROMPT_LENS = (1, 16, 128)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# what a checkpoint holds besides its weights and config.json
SIDE_FILES = ("generation_config.json", "tokenizer*", "*_tokens*.json", "vocab.*", "merges.txt")
SIDE_FILES += ("chat_template*",)


class ChangedFunctionError(SpeccError):
    """The widened model does not compute what the trained one does."""


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


class Progress:
    """Prints a line of progress whenever two seconds have passed without one."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        if time.monotonic() - self._last > 2:
            self._last = time.monotonic()
            print(f"widen_target: {text}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the script; 0: done, 1: the widened model computes something else, 2: wrong input."""
    transformers_logging.disable_progress_bar()
    try:
        run(parse_args(argv))
    except SpeccError as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, ChangedFunctionError) else 2
    return 0


def run(args: argparse.Namespace) -> None:
    """Widen the model, verify what was written, and put it in place."""
    progress = Progress()
    source, output = hf_model.resolve_directory(args.source), args.output.resolve()
    check_output(source, output, args.force)
    trained = load_source(source)
    count = ParameterCount.of(trained)
    before = Size(trained.config.num_hidden_layers, trained.config.intermediate_size)
    size = choose_size(count, before, args)
    print(f"{'source':<10}{args.source}: {describe(trained.config, count, before)}", flush=True)
    print(f"{'widened':<10}{describe(trained.config, count, size)}", flush=True)
    with staging_directory(output) as staging:
        model = build_widened(trained, size, args.seed, progress)
        progress("writing")
        save(model.to(DTYPES[args.dtype]), source, staging)
        del model  # the comparison loads it anew
        progress("comparing the logits")
        verify(trained, staging, args)
    num_bytes = sum(file.stat().st_size for file in output.iterdir())
    print(f"{'output':<10}{args.output}: {format_bytes(num_bytes)}, {args.dtype}")


def describe(config: PretrainedConfig, count: ParameterCount, size: Size) -> str:
    """One line about a model of that size."""
    return (
        f"{config.model_type}, {count.total(size):,} parameters, {size.num_layers} layers,"
        f" intermediate size {size.intermediate_size}, hidden size {config.hidden_size}"
    )


def load_source(source: Path) -> PreTrainedModel:
    """Load the trained model in float32.

    Raises:
        NotCausalLMError: the family is another one, or the weights are quantized.
        WeightError: the weights are incomplete or cannot be read.
    """
    config = hf_model.load_config(source)
    is_quantized = getattr(config, "quantization_config", None) is not None
    if config.model_type not in FAMILIES or is_quantized:
        raise NotCausalLMError(
            f"{source}: model type {config.model_type}{', quantized' if is_quantized else ''}",
            f"a model of {', '.join(FAMILIES)} that is not quantized",
            "choose another model: zero output weights are known to keep only these unchanged",
        )
    try:
        with hf_model.quiet_transformers():
            model, report = AutoModelForCausalLM.from_pretrained(
                source, dtype=torch.float32, output_loading_info=True
            )
        reason = f"no tensor {min(report['missing_keys'])}" if report["missing_keys"] else ""
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
    if reason:
        raise WeightError(
            f"{source}: {reason}",
            "a complete checkpoint of the model in config.json",
            "copy or download the checkpoint again",
        )
    return model.eval()


def choose_size(count: ParameterCount, before: Size, args: argparse.Namespace) -> Size:
    """The size that the options ask for.

    Raises:
        ConfigError: it is smaller than the source, or no size has so many parameters.
    """
    for option, wanted, least in (
        ("--num-layers", args.num_layers, before.num_layers),
        ("--intermediate-size", args.intermediate_size, before.intermediate_size),
        ("--parameters", args.parameters, count.total(before)),
    ):
        if wanted is not None and wanted < least:
            raise ConfigError(
                f"{option} {wanted}",
                f"{least} or more: the source has {least}",
                "widening only adds; choose a larger number, or a smaller source",
            )
    if args.parameters is not None:
        return fit_size(count, before, args)
    if args.num_layers is None and args.intermediate_size is None:
        raise ConfigError(
            "none of --parameters, --num-layers, --intermediate-size",
            "the size of the widened model",
            "add --parameters 100M, for example",
        )
    return Size(
        args.num_layers or before.num_layers, args.intermediate_size or before.intermediate_size
    )


def fit_size(count: ParameterCount, before: Size, args: argparse.Namespace) -> Size:
    """The size of most layers, up to 24, whose parameters are within 2 % of `--parameters`."""
    most = args.num_layers or max(before.num_layers, MAX_LAYERS)
    least = args.num_layers or before.num_layers
    sizes = []
    for num_layers in range(most, least - 1, -1):
        columns = args.intermediate_size
        if columns is None:
            free = args.parameters - count.total(Size(num_layers, 0))
            exact = free / (num_layers * count.per_column)
            columns = round(exact / COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        sizes.append(Size(num_layers, max(columns, before.intermediate_size)))

    def error(size: Size) -> float:
        return abs(count.total(size) / args.parameters - 1)

    for size in sizes:
        if error(size) <= SIZE_TOLERANCE:
            return size
    best = min(sizes, key=error)
    raise ConfigError(
        f"--parameters {args.parameters:,}",
        f"a number that layers and columns add up to, within {SIZE_TOLERANCE:.0%}; the nearest"
        f" is {count.total(best):,} with {best.num_layers} layers and an intermediate size of"
        f" {best.intermediate_size}",
        f"pass --parameters {count.total(best)}, or leave out the options that fix the size",
    )


def build_widened(
    trained: PreTrainedModel, size: Size, seed: int, progress: Progress
) -> PreTrainedModel:
    """Return a model of this size, in float32, that computes what the trained one does."""
    before, donors = trained.config.num_hidden_layers, donor_layers(trained.config, size)
    with hf_model.quiet_transformers():
        model = AutoModelForCausalLM.from_config(
            widened_config(trained.config, size), dtype=torch.float32
        )
    old = dict(trained.named_parameters())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            index, is_new = layer_index(name), False
            if index is not None:
                is_new = index > 0 and donors[index] == donors[index - 1]
                progress(f"drawing weights, layer {index + 1} of {size.num_layers} (was {before})")
                name = name.replace(f".layers.{index}.", f".layers.{donors[index]}.")
            parameter.copy_(widen(name, old[name], parameter.shape, is_new, generator))
    return model.eval()


def donor_layers(config: PretrainedConfig, size: Size) -> list[int]:
    """For each layer, the trained one that it is or whose spread it has.

    The first layer of each donor is the donor itself; the new ones stand after it. Any place
    would do, since they add zero; in this one they keep the order of sliding and full attention.
    """
    return [i * config.num_hidden_layers // size.num_layers for i in range(size.num_layers)]


def widened_config(config: PretrainedConfig, size: Size) -> PretrainedConfig:
    donors, widened = donor_layers(config, size), copy.deepcopy(config)
    widened.num_hidden_layers = size.num_layers
    widened.intermediate_size = size.intermediate_size
    if getattr(config, "layer_types", None) is not None:
        widened.layer_types = [config.layer_types[donor] for donor in donors]
    first_sliding = getattr(config, "max_window_layers", None)
    if first_sliding is not None:
        # what says the same to readers that do not know layer_types
        num_full = sum(donor < first_sliding for donor in donors)
        widened.max_window_layers = max(num_full, first_sliding)
    return widened


def widen(
    name: str, old: Tensor, shape: torch.Size, is_new: bool, generator: torch.Generator
) -> Tensor:
    """Return the value of a parameter.

    Args:
        old: its value there, or for a new layer that of the layer whose spread it has.
        shape: its shape in the widened model, no smaller than the old one.
        is_new: whether the layer is new.
        generator: what random values come from.
    """
    if ".o_proj." in name or ".down_proj." in name:
        new = torch.zeros(shape)  # a bias too: nothing of it may reach the residual stream
    else:
        # neither zero nor denormal, so that arithmetic on them takes its usual time
        new = torch.randn(shape, generator=generator) * old.std(correction=0) + old.mean()
    if not is_new:
        new[tuple(slice(length) for length in old.shape)] = old
    return new


def layer_index(name: str) -> int | None:
    """The layer that a parameter belongs to."""
    match = re.search(r"\.layers\.(\d+)\.", name)
    return int(match.group(1)) if match else None


def save(model: PreTrainedModel, source: Path, directory: Path) -> None:
    """Write a checkpoint, with the source's tokenizer and generation settings."""
    with hf_model.quiet_transformers():
        model.save_pretrained(directory)
    for pattern in SIDE_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, directory / file.name)


@torch.inference_mode()
def verify(trained: PreTrainedModel, directory: Path, args: argparse.Namespace) -> None:
    """Compare the logits of the trained model and of a checkpoint, both in float32.

    Raises:
        ChangedFunctionError: they differ by more than rounding.
    """
    with hf_model.quiet_transformers():
        widened = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(args.seed)
    differences, is_same_choice = [], []
    for length in PROMPT_LENS:
        shape = (1, min(length, trained.config.max_position_embeddings))
        ids = torch.randint(trained.config.vocab_size, shape, generator=generator)
        want, got = (model(ids, use_cache=False).logits[0] for model in (trained, widened))
        differences.append((want - got).abs().amax(-1))
        is_same_choice.append(want.argmax(-1) == got.argmax(-1))
    difference, same = float(torch.cat(differences).max()), torch.cat(is_same_choice)
    print(
        f"{'equality':<10}logits differ by {difference:.1e} at most; same best token at"
        f" {int(same.sum())} of {len(same)} positions of {len(PROMPT_LENS)} prompts",
        flush=True,
    )
    if not difference <= LOGIT_TOLERANCE:  # so that NaN fails
        raise ChangedFunctionError(
            f"logits that differ by {difference:.1e}",
            f"{LOGIT_TOLERANCE:.0e} at most",
            f"nothing was written; {args.dtype} may round the source's weights, so try"
            " --dtype float32",
        )


def check_output(source: Path, output: Path, force: bool) -> None:
    """Refuse an output that exists, or whose removal would lose something else.

    Raises:
        OutputError: with `force` too, where the output is no checkpoint or holds the source.
    """
    if not output.exists():
        return
    if not force:
        raise OutputError(
            f"{output} exists",
            "a path where nothing is",
            "choose another output, or pass --force to replace this checkpoint",
        )
    holds_source = source.resolve().is_relative_to(output)
    if holds_source or not (output / "config.json").is_file():
        raise OutputError(
            f"{output} {'holds the source' if holds_source else 'is no checkpoint'},"
            " so --force does not replace it",
            "a path where nothing is, or a checkpoint to replace",
            "choose another output",
        )


@contextmanager
def staging_directory(output: Path) -> Iterator[Path]:
    """A directory beside the output, which becomes the output unless an exception passes.

    Raises:
        OutputError: something cannot be written.
    """
    staging = output.parent / f".{output.name}.partial-{os.getpid()}"
    try:
        staging.mkdir(parents=True)
        yield staging
        if output.exists():  # check_output has allowed this
            shutil.rmtree(output)
        staging.rename(output)
    except OSError as error:
        raise output_error(output, error) from error
    except SafetensorError as error:
        # how a full disk is reported
        raise output_error(output, OSError(str(error))) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def parse_number(text: str) -> int:
    """Read a number of parameters: `100M`, `1.5B`, `6_800_000`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.replace("_", "").upper())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 100M or 1.5B")
    return round(float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9}[match[2]])


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--source", required=True, help="checkpoint of the trained model")
    add("--output", type=Path, required=True, help="directory to write the widened model to")
    add("--parameters", type=parse_number, help="parameters to reach, such as 100M")
    add("--num-layers", type=int, help="layers, instead of a choice by the script")
    add("--intermediate-size", type=int, help="feed-forward columns, instead of a choice")
    add("--dtype", choices=DTYPES, default="float32", help="dtype of the weights")
    add("--seed", type=int, default=0, help="seed of the random weights")
    add("--force", action="store_true", help="replace a checkpoint at --output")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
