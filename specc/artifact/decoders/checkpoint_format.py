"""Which decoder reads a checkpoint, by its `quantization_config`; what none reads is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specc.artifact.decoders import (
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    fbgemm_fp8,
    finegrained_fp8,
    gptq,
    modelopt,
    mxfp4,
    quark,
)
from specc.artifact.decoders.decoded_reader import DecodedReader
from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.gguf_checkpoint import find_gguf, open_gguf
from specc.artifact.decoders.refusals import unknown_scheme
from specc.artifact.safetensors_io import SINGLE_FILE, SafetensorsReader, TensorReader
from specc.errors import WeightError
from specc.system.json_file import read_json

_Decode = Callable[[TensorReader, Mapping[str, Any], bool], dict[str, DecodedWeight]]
_DECODERS: dict[str, _Decode] = {
    compressed_tensors.METHOD: compressed_tensors.decode,
    gptq.METHOD: gptq.decode,
    awq.METHOD: awq.decode,
    finegrained_fp8.METHOD: finegrained_fp8.decode,
    mxfp4.METHOD: mxfp4.decode,
    auto_round.METHOD: auto_round.decode,
    "intel/auto-round": auto_round.decode,
    fbgemm_fp8.METHOD: fbgemm_fp8.decode,
    modelopt.METHOD: modelopt.decode,
    bitsandbytes.METHOD: bitsandbytes.decode,
    quark.METHOD: quark.decode,
}
QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
# what ModelOpt, AutoGPTQ and AutoAWQ write beside config.json, with the scheme in it alone
_FILES = {
    "hf_quant_config.json": modelopt.METHOD,
    "quantize_config.json": gptq.METHOD,
    "quant_config.json": awq.METHOD,
}
# with layers by name, such files have some hundred kilobytes
_MOST_BYTES = 16 << 20


def open_checkpoint(
    directory: Path, config: Any, is_weight_only: bool = False
) -> SafetensorsReader | DecodedReader:
    """A reader of a Hugging Face directory's weights, quantized or not, or of a GGUF file there.

    Args:
        config: its configuration, with a `quantization_config` where it is quantized.
        is_weight_only: take weights as they are where activations are quantized, too.
    Raises:
        ModelNotFoundError: no checkpoint is there.
        WeightError: it is malformed, or quantized in a way that specc does not read.
    """
    if (file := find_gguf(directory)) is not None:
        return DecodedReader(*open_gguf(file, config))
    fields = quantization_fields(config)
    if fields is None:
        fields = _fields_beside(directory)
    if fields is None:
        return SafetensorsReader(directory)
    where = str(directory)
    method = _method_of(fields)
    if method not in _DECODERS:
        raise unknown_scheme(str(method or "by no method that config.json names"), where)
    reader = SafetensorsReader(_file_of(directory, fields), reads_float8=True)
    try:
        weights = _DECODERS[method](reader, fields, is_weight_only)
        if not weights:
            raise WeightError(
                f"{where} holds no weights that are quantized as {method}",
                f"tensors of {method}, which quantization_config names",
                'remove "quantization_config" from config.json, or download the checkpoint again',
            )
        return DecodedReader(reader, weights)
    except BaseException:
        reader.close()
        raise


def _method_of(fields: Mapping[str, Any]) -> Any:
    """What has quantized a checkpoint; None: nothing is named.

    A producer alone is named by some configurations of ModelOpt.
    """
    producer = fields.get("producer")
    named = producer.get("name") if isinstance(producer, Mapping) else None
    return fields.get("quant_library") or fields.get("quant_method") or named


def _file_of(directory: Path, fields: Mapping[str, Any]) -> Path:
    """The directory, or a file of another name in it, as AutoGPTQ wrote them."""
    name = str(fields.get("model_file_base_name"))
    file = directory / f"{name}.safetensors"
    is_own = name == Path(name).name and file.is_file()
    return file if is_own and not (directory / SINGLE_FILE).is_file() else directory


def _fields_beside(directory: Path) -> dict[str, Any] | None:
    """What a file of the program that has quantized the model says."""
    for name, method in _FILES.items():
        if (directory / name).is_file():
            needed, do = "an object that says how weights are quantized", "download it again"
            found = read_json(directory / name, WeightError, needed, do, max_bytes=_MOST_BYTES)
            if not isinstance(found, dict):
                raise WeightError(f"{directory / name} holds {found!r:.40}", needed, do)
            return {"quant_method": method} | found
    return None


def without_quantization(config: Any) -> Any:
    """The configuration of the model itself, whose weights are plain; a copy."""
    plain = copy.deepcopy(config)
    for name in QUANTIZATION_FIELDS:
        if hasattr(plain, name):
            delattr(plain, name)
    return plain


def quantization_fields(config: Any) -> dict[str, Any] | None:
    """The `quantization_config` of a configuration as a dictionary, or None."""
    for name in QUANTIZATION_FIELDS:
        found = getattr(config, name, None)
        if found is not None:
            return dict(found) if isinstance(found, Mapping) else dict(vars(found))
    return None
