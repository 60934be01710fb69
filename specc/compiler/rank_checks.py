"""What a configuration says about cutting a model for ranks, before anything is traced."""

from __future__ import annotations

from typing import Any

from specc.config import CompileConfig
from specc.errors import ConfigError

# what has to be divisible, by the names that configurations have for it
_SIZES = {
    "attention heads": ("num_attention_heads", "n_head"),
    "inner features": ("intermediate_size", "ffn_dim", "n_inner"),
    "inner features of experts": ("moe_intermediate_size",),
}
_KV_HEADS = "num_key_value_heads"


def check_ranks(config: CompileConfig, model: Any) -> None:
    """Sizes that a configuration names; what it does not name, the cut itself checks.

    Args:
        config: options.
        model: the target's configuration; None for a module without one.
    Raises:
        ConfigError: a size that the number of ranks does not divide.
    """
    num_ranks = config.tensor_parallel_size
    if num_ranks == 1 or model is None:
        return
    found = {
        what: size
        for what, names in _SIZES.items()
        if (size := next((_size(model, name) for name in names if _size(model, name)), None))
    }
    for what, size in found.items():
        if size % num_ranks:
            raise _indivisible(num_ranks, f"{size} {what}", [size])
    kv_heads = _size(model, _KV_HEADS)
    if kv_heads and kv_heads % num_ranks and num_ranks % kv_heads:
        raise _indivisible(num_ranks, f"{kv_heads} key and value heads", list(found.values()))


def _size(model: Any, name: str) -> int | None:
    value = getattr(model, name, None)
    return value if type(value) is int and value > 0 else None


def _indivisible(num_ranks: int, found: str, sizes: list[int]) -> ConfigError:
    fits = [n for n in range(2, min(sizes) + 1) if all(size % n == 0 for size in sizes)]
    names = ", ".join(map(str, fits[:6]))
    return ConfigError(
        f"--tensor-parallel-size {num_ranks}, and {found} in the target",
        f"a number that divides them: {names}" if fits else "a size that divides them",
        "choose another --tensor-parallel-size",
    )
