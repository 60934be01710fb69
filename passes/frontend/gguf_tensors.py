"""Whether a model reads every tensor of its GGUF file, as llama.cpp asks of the files it takes.

What a configuration leaves out is no part of the model that is built: a bias would be passed over,
or factors of rotary frequencies, and the model would say something else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specc.artifact.decoders.decoded_reader import DecodedReader
from specc.artifact.decoders.gguf_file import GGUFReader
from specc.artifact.decoders.stored_tensors import read_tensor
from specc.errors import WeightError

# one factor for each rotary frequency: of Llama 3.1 and later, and of heads rotated in part
FREQUENCIES = "rope_freqs.weight"
# of longrope: up to the length that a model was trained for, and beyond it
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
_TOLERANCE = 1e-4
# a frequency that is not there is divided by this
NEVER = 1e30


def check_tensors(reader: DecodedReader, module: nn.Module, config: Any) -> None:
    """See that the model is made of all tensors, where the checkpoint is a GGUF file.

    Args:
        module: the model, of which names are read.
    Raises:
        WeightError: a tensor that the model has no use for, or factors of rotary frequencies that
            are not those of the configuration.
    """
    stored = reader.stored
    if not isinstance(stored, GGUFReader):
        return
    own = module.state_dict().keys()
    factors = {
        FREQUENCIES: are_factors_of,
        SHORT: lambda found, config: _are_listed(found, config, "short_factor"),
        LONG: lambda found, config: _are_listed(found, config, "long_factor"),
    }
    for key in reader.keys():  # noqa: SIM118 - a reader is no mapping
        if key in own:
            continue
        weight = reader.decoded(key)
        tensor = stored.tensors[weight.tensors[0] if weight is not None and weight.tensors else key]
        file = tensor.file.resolve()  # the cache has links
        if key in factors:
            if factors[key](read_tensor(stored, key).float(), config):
                continue
            raise WeightError(
                f"{file} has factors of rotary frequencies ({key}) that config.json does not say",
                "the same rotary scaling",
                "pass the config.json of the same model, or the file alone",
            )
        raise WeightError(
            f"{file} holds {tensor.name}, which is no part of {type(module).__name__} as its"
            " configuration says",
            "a file all of whose tensors are read",
            "pass the checkpoint in safetensors",
        )


def are_factors_of(found: Tensor, config: Any) -> bool:
    """Whether these are what a configuration divides its rotary frequencies by.

    Args:
        found: [head_dim / 2].
    """
    wanted = _factors(_rope(config), config)
    is_close = found.shape == wanted.shape and (found - wanted).abs() <= _TOLERANCE * wanted
    return bool(torch.as_tensor(is_close).all())


def _are_listed(found: Tensor, config: Any, name: str) -> bool:
    wanted = torch.tensor(_rope(config).get(name) or [], dtype=torch.float32)
    return wanted.shape == found.shape and bool(torch.allclose(found, wanted, rtol=_TOLERANCE))


def _rope(config: Any) -> dict[str, Any]:
    """Parameters of layers that see all."""
    rope: dict[str, Any] = config.rope_parameters
    return rope.get("full_attention", rope)


def _factors(rope: dict[str, Any], config: Any) -> Tensor:
    """[head_dim / 2] float32, of which two scalings have others than 1."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    width = _head_dim(config)
    if rope.get("rope_type") == "proportional":
        rotated = int(rope["partial_rotary_factor"] * width / 2)
        return torch.tensor([1.0] * rotated + [NEVER] * (width // 2 - rotated))
    if rope.get("rope_type") != "llama3":
        return torch.ones(width // 2)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2).float() / width)
    return plain / scaled


def _head_dim(config: Any) -> int:
    """Of layers that see all, where layers differ."""
    try:
        width = getattr(config, "head_dim", None)
    except RuntimeError:  # layers differ, and the configuration of all of them has no such number
        full = list(config.layer_types).index("full_attention")
        width = config.per_layer_config[full].head_dim
    return int(width or config.hidden_size // config.num_attention_heads)
