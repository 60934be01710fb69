"""A model of transformers as a stateful model of OpenVINO, as its GenAI pipelines read them.

Optimum for OpenVINO, which usually writes them, needs an older transformers than specc. Inputs are
`input_ids`, `attention_mask`, `position_ids` [B, T] and `beam_idx` [B]; the output is `logits`
[B, T, V]; keys and values [B, H, T, D] of earlier tokens are states of the model.

Source: the form of such models, and the transformations that make it, are those of
https://github.com/huggingface/optimum-intel, optimum/exporters/openvino/stateful.py.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy
import openvino
import torch
import transformers
from openvino import opset13
from openvino._offline_transformations import apply_make_stateful_transformation
from torch import Tensor, nn

from specc.bench.peers.peer import Form, NotAvailableError

# as the engine's, of all matrices, without zero points: int8 by output, int4 by groups of 32
_INTEGERS: dict[str, dict[str, Any]] = {
    "int8": {"mode": "int8_sym"},
    "int4": {
        "mode": "int4_sym",
        "group_size": 32,
        "ratio": 1.0,
        "all_layers": True,
    },
}
_MODEL = "openvino_model.xml"
# of what is traced; lengths differ, so that none is taken for another
_BATCH, _PAST, _OWN = 2, 3, 4


def export(checkpoint: Path, form: Form, output: Path) -> None:
    """Write the model, its configuration and its tokenizer.

    Args:
        checkpoint: directory that transformers reads.
        form: of the weights; nncf rounds them to integers, as its users do.
        output: empty directory.
    Raises:
        NotAvailableError: not a decoder whose layers all keep keys and values of all tokens, or one
            that OpenVINO cannot convert.
    """
    transformers.logging.set_verbosity_error()
    if not checkpoint.is_dir():
        raise NotAvailableError(f"specc's converter reads directories, and {checkpoint} is not one")
    try:
        # rounded as the engine's are; which type passes compute in is a property of pipelines
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint,
            dtype=getattr(torch, form.dtype),
            attn_implementation="sdpa",
            local_files_only=True,
        )
        model = model.float().eval()
    except (OSError, ValueError) as error:
        raise NotAvailableError(f"transformers cannot load it ({_first_line(error)})") from error
    converted = _convert(model)
    _keep_states(converted, model.config)
    if form.integers is not None:
        converted = _rounded(converted, **_INTEGERS[form.integers])
    openvino.save_model(converted, output / _MODEL, compress_to_fp16=False)
    for name in ("config.json", "generation_config.json"):
        if (checkpoint / name).is_file():
            shutil.copy(checkpoint / name, output / name)
    _save_tokenizer(checkpoint, output)


def _rounded(converted: Any, mode: str, **options: Any) -> Any:
    import nncf  # takes seconds, and only integers need it

    return nncf.compress_weights(converted, mode=nncf.CompressWeightsMode(mode), **options)


class _Rows:
    """Keys and values as transformers' caches have them: given ones, and those of the pass."""

    is_compileable = False

    def __init__(self, past: list[Tensor]) -> None:
        self.past = past
        self.present: list[Tensor] = [torch.empty(0)] * len(past)

    def get_seq_length(self, layer: int = 0) -> int:
        return self.past[0].shape[2]

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        own = slice(2 * layer, 2 * layer + 2)
        self.present[own] = [
            torch.cat(pair, dim=2) for pair in zip(self.past[own], (keys, values), strict=True)
        ]
        return self.present[own][0], self.present[own][1]


class _Decoder(nn.Module):
    """Rows in, logits and rows out, so that nothing of a pass is hidden from a tracer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, ...]:
        rows = _Rows(past)
        first, width = past[0].shape[2], input_ids.shape[1]
        queries = torch.arange(first, first + width)[:, None]
        keys = torch.arange(first + width)[None, :]
        is_seen = (keys <= queries)[None, None] & attention_mask[:, None, None, :].to(torch.bool)
        least = torch.finfo(torch.float32).min
        mask = torch.zeros(is_seen.shape, dtype=torch.float32).masked_fill(~is_seen, least)
        found = self.model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=rows,
            use_cache=True,
        )
        return (found.logits, *rows.present)


def _convert(model: Any) -> Any:
    """An OpenVINO model with rows as inputs and outputs, all of them named."""
    config = model.config
    heads, width = _heads(config)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
        raise NotAvailableError(
            "specc's converter writes models whose layers all look at all tokens, and this has"
            f" {', '.join(sorted(kinds))} and the window {getattr(config, 'sliding_window', None)}"
        )
    layers = config.num_hidden_layers
    example = {
        "input_ids": torch.ones(_BATCH, _OWN, dtype=torch.long),
        "attention_mask": torch.ones(_BATCH, _PAST + _OWN, dtype=torch.long),
        "position_ids": torch.arange(_PAST, _PAST + _OWN)[None].repeat(_BATCH, 1),
        "past": [torch.randn(_BATCH, heads, _PAST, width) for _ in range(2 * layers)],
    }
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a tracer's, about lengths that are handled above
            converted = openvino.convert_model(_Decoder(model), example_input=example)
    except Exception as error:
        raise NotAvailableError(f"OpenVINO cannot convert it ({_first_line(error)})") from error
    flat = ["input_ids", "attention_mask", "position_ids"]
    for port, name in zip(converted.inputs, flat + _row_names("past", layers), strict=True):
        port.get_tensor().set_names({name})
        shape = [-1, -1] if name in flat else [-1, heads, -1, width]
        port.get_node().set_partial_shape(openvino.PartialShape(shape))
    for port, name in zip(
        converted.outputs, ["logits", *_row_names("present", layers)], strict=True
    ):
        port.get_tensor().set_names({name})
    converted.validate_nodes_and_infer_types()
    return converted


def _keep_states(converted: Any, config: Any) -> None:
    """Turn rows into states, in an order that `beam_idx` may change, and empty at first."""
    heads, width = _heads(config)
    past = _row_names("past", config.num_hidden_layers)
    present = _row_names("present", config.num_hidden_layers)
    order = opset13.parameter(openvino.PartialShape([-1]), openvino.Type.i32, name="beam_idx")
    order.output(0).get_tensor().set_names({"beam_idx"})
    converted.add_parameters([order])
    for name in past:
        port = converted.input(name)
        readers = port.get_target_inputs()
        ordered = opset13.gather(port, order, opset13.constant(0))
        for reader in readers:
            reader.replace_source_output(ordered.output(0))
    converted.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(converted, dict(zip(past, present, strict=True)))
    shape = opset13.shape_of(converted.input("input_ids"), output_type="i64")
    batch = opset13.gather(shape, opset13.constant([0]), opset13.constant(0))
    sizes = [opset13.constant(numpy.array([size], dtype=numpy.int64)) for size in (heads, 0, width)]
    for node in converted.get_ops():
        if node.get_type_name() == "ReadValue":
            zero = opset13.constant(0.0, dtype=node.get_output_element_type(0))
            empty = opset13.broadcast(zero, opset13.concat([batch, *sizes], axis=0))
            node.set_arguments([empty])
    converted.validate_nodes_and_infer_types()


def _save_tokenizer(checkpoint: Path, output: Path) -> None:
    """Its pipelines compare tokenizers of target and draft, though prompts come as token ids."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
        from openvino_tokenizers import convert_tokenizer

        pair = convert_tokenizer(tokenizer, with_detokenizer=True)
    except Exception:
        # of any kind, and no harm to plain decoding; who needs it says so
        return
    for name, one in zip(("openvino_tokenizer", "openvino_detokenizer"), pair, strict=True):
        openvino.save_model(one, output / f"{name}.xml")


def _heads(config: Any) -> tuple[int, int]:
    """Heads of keys and values, and their width."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return heads, width


def _row_names(kind: str, layers: int) -> list[str]:
    name = "past_key_values" if kind == "past" else kind
    return [f"{name}.{layer}.{part}" for layer in range(layers) for part in ("key", "value")]


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
