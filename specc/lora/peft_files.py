"""Adapters as PEFT writes them: adapter_config.json, and adapter_model.safetensors beside it.

Layout and arithmetic: https://huggingface.co/docs/peft, `LoraConfig` and `LoraLayer`: a product
x · Wᵀ becomes x · Wᵀ + scale · (x · Aᵀ) · Bᵀ with A [r, inputs], B [outputs, r], and scale
lora_alpha / r, or lora_alpha / √r (rsLoRA, 2312.03732). `rank_pattern` and `alpha_pattern` have
other values for modules whose names they match. What changes more than such products is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specc.artifact.safetensors_io import SafetensorsReader
from specc.artifact.weight_spec import Source, WeightSpec
from specc.artifact.weights import read_weight
from specc.errors import ConfigError, WeightError
from specc.system.json_file import JsonError, parse_json

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MOST_ADAPTERS, MOST_RANK = 256, 4096
# a name is a model's name in requests, and stands before = in the option
_NAME = re.compile(r"[^\s=/\\][^\s=\\]{0,127}")
# of training alone, or what the tensors say themselves
_TOLD = (
    "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "peft_version", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "lora_dropout", "fan_in_fan_out", "megatron_config", "megatron_core", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "ensure_weight_tying",
)  # fmt: skip
_READ = (
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias",
    "init_lora_weights",
)  # fmt: skip
# what else there is, with what it would take
_REFUSED = {
    "use_dora": "a norm of each row of the sum (DoRA)",
    "modules_to_save": "whole modules of its own",
    "lora_bias": "biases of its own",
    "use_qalora": "inputs that are pooled (QALoRA)",
    "layer_replication": "layers that are there several times",
    "trainable_token_indices": "rows of the embedding of its own",
    "target_parameters": "parameters that are not those of a projection, as experts have them",
    "arrow_config": "a choice among adapters for each token (Arrow)",
    "alora_invocation_tokens": "tokens from which on it is there (aLoRA)",
}
# the others change the weights that it is beside (pissa, olora, loftq, corda, lora_ga)
_INITS = (True, False, "gaussian", "eva", "orthogonal")
_PREFIX = "base_model.model."
# where a wrapper of several modalities has its language model
_OF_TEXT = (("model.language_model.", "model."), ("language_model.", ""))
_MERGE = "merge it: PeftModel.from_pretrained(…).merge_and_unload().save_pretrained(…), and compile"


class LoraPair(NamedTuple):
    """The low-rank term beside one projection.

    Args:
        module: path of the projection in its model.
        down: name of A [rank, inputs] in the file.
        up: of B [outputs, rank].
        scale: factor of the term.
    """

    module: str
    down: str
    up: str
    rank: int
    inputs: int
    outputs: int
    scale: float


@dataclass(frozen=True)
class LoraFiles:
    """An adapter that is there.

    Args:
        name: as requests call it.
        path: its directory.
        pairs: module → its term.
    """

    name: str
    path: Path
    reader: SafetensorsReader
    pairs: Mapping[str, LoraPair]

    @classmethod
    def open(cls, name: str, path: Path) -> LoraFiles:
        """Read the configuration and the header; no tensor.

        Raises:
            ConfigError: there is no such adapter, or it is more than low-rank terms.
            WeightError: tensors do not fit each other, or the configuration.
        """
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            if not (path / file).is_file():
                raise ConfigError(
                    f"--lora {name}={path}: no {file}",
                    f"a directory of PEFT's, with {CONFIG_FILE} and {WEIGHTS_FILE}",
                    "save the adapter with PeftModel.save_pretrained(…), which writes both",
                )
        config = _read_config(name, path / CONFIG_FILE)
        reader = SafetensorsReader(path / WEIGHTS_FILE)
        return cls(name, path, reader, _pairs(name, config, reader))

    @property
    def rank(self) -> int:
        """The largest."""
        return max(pair.rank for pair in self.pairs.values())

    def read(self, pair: LoraPair, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A [rank, inputs] and the transpose of B, [rank, outputs].

        Raises:
            WeightError: values that are no finite numbers in this type.
        """
        shapes = (pair.rank, pair.inputs), (pair.rank, pair.outputs)
        sources = Source(pair.down), Source(pair.up, transpose=True)
        down, up = (
            read_weight(WeightSpec(source.name, dtype, shape, (source,)), self.reader)
            for shape, source in zip(shapes, sources, strict=True)
        )
        return down, up


def parse_adapters(given: Iterable[str]) -> dict[str, Path]:
    """Name → directory, of `NAME=DIR` each.

    Raises:
        ConfigError: another form, a name twice, or too many.
    """
    found: dict[str, Path] = {}
    for text in given:
        name, equals, path = str(text).partition("=")
        if not equals or not path or not _NAME.fullmatch(name):
            raise ConfigError(
                f"--lora {text}",
                "NAME=DIR: a name without spaces, as requests will call it, and PEFT's directory",
                "pass --lora sql=adapters/sql",
            )
        if name in found:
            raise ConfigError(f"--lora {name}=… twice", "a name for each adapter", "rename one")
        found[name] = Path(path)
    if len(found) > MOST_ADAPTERS:
        raise ConfigError(
            f"{len(found)} times --lora", f"at most {MOST_ADAPTERS}", "leave some out"
        )
    return found


def _read_config(name: str, file: Path) -> dict[str, Any]:
    try:
        config = parse_json(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, JsonError) as error:
        raise ConfigError(f"{file}: {error}", "JSON, as PEFT writes it", "save it again") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is no JSON object", "one, as PEFT writes it", "save it again")
    kind = config.get("peft_type")
    if kind != "LORA":
        raise _refused(name, f"peft_type {kind!r}", "LORA: low-rank terms beside projections")
    for key, value in config.items():
        is_off = value is None or value is False or value in ([], {})
        if is_off or key in _TOLD or key in _READ:
            continue
        needed = _REFUSED.get(key, "keys that specc knows: what this one asks for is not read")
        verb = "without " if key in _REFUSED else ""
        raise _refused(name, f"{key}: {value!r:.60}", f"low-rank terms alone, {verb}{needed}")
    if config.get("bias", "none") != "none":
        raise _refused(name, f"bias: {config['bias']!r}", "bias: none")
    init = config.get("init_lora_weights", True)
    if not any(init is x or (isinstance(x, str) and init == x) for x in _INITS):
        raise _refused(
            name,
            f"init_lora_weights: {init!r}",
            "an adapter of the target's own weights: this one is of weights that it has changed",
        )
    return config


def _refused(name: str, found: str, needed: str) -> ConfigError:
    return ConfigError(f"adapter {name} with {found}", needed, _MERGE)


def _pairs(name: str, config: Mapping[str, Any], reader: SafetensorsReader) -> dict[str, LoraPair]:
    halves: dict[str, dict[str, str]] = {}
    for key in reader.keys():  # noqa: SIM118  no mapping
        module, _, half = key.removeprefix(_PREFIX).rpartition(".lora_")
        if not key.startswith(_PREFIX) or half not in ("A.weight", "B.weight"):
            raise _refused(name, f"the tensor {key}", "lora_A.weight and lora_B.weight alone")
        halves.setdefault(module, {})[half[0]] = key
    if not halves:
        raise _refused(name, "no tensors", "low-rank terms")
    return {module: _pair(name, config, reader, module, own) for module, own in halves.items()}


def _pair(
    name: str,
    config: Mapping[str, Any],
    reader: SafetensorsReader,
    module: str,
    halves: Mapping[str, str],
) -> LoraPair:
    if set(halves) != {"A", "B"}:
        raise WeightError(
            f"adapter {name}: {module} has {', '.join(halves.values())}", "A and B", "save it again"
        )
    down, up = reader.shape(halves["A"]), reader.shape(halves["B"])
    floats = all(reader.dtype(key).is_floating_point for key in halves.values())
    if len(down) != 2 or len(up) != 2 or down[0] != up[1] or not floats:
        raise WeightError(
            f"adapter {name}: {module} has A {list(down)} and B {list(up)}",
            "floats, [rank, inputs] and [outputs, rank]",
            "save the adapter again",
        )
    rank = _number(name, "r", _of_pattern(name, config, "rank_pattern", module, "r", 8))
    if rank != down[0] or not 1 <= down[0] <= MOST_RANK:
        raise WeightError(
            f"adapter {name}: {module} has rank {down[0]}, {CONFIG_FILE} says {rank:g}",
            f"one of both, 1 … {MOST_RANK}",
            "save the adapter again",
        )
    alpha = _of_pattern(name, config, "alpha_pattern", module, "lora_alpha", 8)
    by = math.sqrt(down[0]) if config.get("use_rslora") else down[0]
    scale = _number(name, "lora_alpha", alpha) / by
    return LoraPair(module, halves["A"], halves["B"], down[0], down[1], up[0], scale)


def _of_pattern(
    name: str, config: Mapping[str, Any], patterns: str, module: str, key: str, default: float
) -> Any:
    """What a configuration says of a module: by the first pattern that its name ends with."""
    found = config.get(patterns) or {}
    for pattern, value in found.items() if isinstance(found, dict) else ():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise _refused(name, f"{patterns} {pattern!r}: {error}", "names of modules") from error
    return config.get(key, default)


def _number(name: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _refused(name, f"{key}: {value!r:.60}", "a finite number")
    return float(value)


def names_of(module: str) -> tuple[str, ...]:
    """Paths that a module of an adapter may have in the traced model, the likeliest first."""
    return (module, *(to + module.removeprefix(of) for of, to in _OF_TEXT if module.startswith(of)))
