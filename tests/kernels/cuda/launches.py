"""What the operators launch, recorded instead of run, for calls on tensors without data.

The calls are those that the shipped configurations are for: the head sizes, vocabularies and
trees that an engine meets. What they launch and what `shipped` lists have to be the same.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specc.artifact.kv_rows import SCALE_BYTES
from specc.kernels.cuda import (
    accept_winners,
    act_and_mul,
    add_norm_linear,
    add_norm_rope_write,
    attend,
    block_mass,
    commit_kv,
    dependent,
    few_rows,
    hadamard,
    leave_step,
    lookup,
    merge,
    rms_norm,
    rope_write,
    rows,
    slab_rows,
    tree_expand,
    trees,
    write_kv,
)
from specc.kernels.cuda.launch import dependent_launches
from specc.kernels.cuda.shipped import ALIGNMENT, TYPE_NAMES, Shipped
from tests.kernels.cuda import (
    launches_attention,
    launches_products,
    launches_states,
    launches_typed,
)
from tests.kernels.cuda.meta_tensors import FLOATS, I32, I64, heads, meta

# multiprocessors of the device that is launched on
NUM_SMS = 132
# options of a launch that does not name them
DEFAULTS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}
_TYPES = {**TYPE_NAMES, torch.int8: "i8", torch.int16: "i16", torch.uint8: "u8"}


@dataclass(frozen=True)
class Launch:
    """One launch, as the compiler knows it: equal ones share a binary.

    Args:
        compiled: kernel, types, constexprs and options.
        divisible: integers that the compiler takes for multiples of 16.
        folded: integers that it takes for constants, because they are 1.
    """

    compiled: tuple[Any, ...]
    divisible: frozenset[str]
    folded: frozenset[str] = frozenset()


def shipped_launch(item: Shipped) -> Launch:
    """What a configuration says of its launches."""
    divisible = {name for name in item.divisible if not item.signature[name].startswith("*")}
    compiled = _compiled(item.kernel, item.signature, item.constexprs, item.options)
    return Launch(compiled, frozenset(divisible))


def _compiled(
    kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any], options: Mapping
) -> tuple[Any, ...]:
    options = {**DEFAULTS, **options}
    parts = (signature, constexprs, options)
    return (kernel.__name__, *(tuple(sorted(part.items())) for part in parts))


def specialized(kernel: Any) -> list[str]:
    """Arguments of a kernel that Triton compiles anew for a 1, and for multiples of 16."""
    is_interpreted = type(kernel).__name__ == "InterpretedFunction"
    fixed = (kernel.kwargs if is_interpreted else vars(kernel))["do_not_specialize"] or ()
    parameters = inspect.signature(kernel.fn).parameters
    assert set(fixed) <= set(parameters), "names, and those of arguments"
    return [name for name in parameters if name not in fixed]


class _Recorder:
    """Takes the place of a kernel."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches
        parameters = inspect.signature(kernel.fn).parameters
        self.names = list(parameters)
        self.defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
        self.constexprs = [n for n, p in parameters.items() if "constexpr" in str(p.annotation)]
        self.specialized = specialized(kernel)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **options: Any) -> None:
        given = dict(zip(self.names, args, strict=False))
        given |= {name: options.pop(name) for name in list(options) if name in self.names}
        given = self.defaults | given
        assert set(given) == set(self.names)
        constant = {n: v for n, v in given.items() if n in self.constexprs or v is None}
        others = {n: v for n, v in given.items() if n not in constant}
        signature = {name: _type(value) for name, value in others.items()}
        integers = [n for n in others if n in self.specialized and isinstance(given[n], int)]
        divisible = frozenset(name for name in integers if given[name] % ALIGNMENT == 0)
        folded = frozenset(name for name in integers if given[name] == 1)
        compiled = _compiled(self.kernel, signature, constant, options)
        self.launches.append(Launch(compiled, divisible, folded))


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int)
    return "i32" if abs(value) < 1 << 31 else "i64"


def record(
    module: types.ModuleType,
    capability: int,
    monkeypatch: Any,
    calls: Callable[[], Iterator[Any]] | None = None,
) -> list[Launch]:
    """The launches of all calls of a file of `specc.kernels.cuda`, or of those that are given."""
    calls = calls or CALLS[module.__name__.rpartition(".")[2]]
    launches: list[Launch] = []
    # others have kernels that it launches, too
    for owner in {module, attend, add_norm_linear, add_norm_rope_write}:
        for name, value in list(vars(owner).items()):
            if name.endswith("_kernel") and hasattr(value, "arg_names"):
                monkeypatch.setattr(owner, name, _Recorder(value, launches))
    for owner in (attend, few_rows):
        monkeypatch.setattr(owner, "machine", lambda device: (capability, NUM_SMS))
    # with early starts where engines have them
    monkeypatch.setattr(dependent, "INTERPRETED", False)
    for is_dependent in (False, True)[: 1 + (capability >= dependent.LEAST_CAPABILITY)]:
        with dependent_launches(is_dependent):
            for _ in calls():
                pass
    return launches


def _rows_calls() -> Iterator[Any]:
    # one sequence, one node, one column, too: what is 1 must not make another binary
    for batch, num_nodes in ((4, 7), (1, 1), (16, 16)):
        nodes = meta(num_nodes, dtype=I32)
        yield rows.tree_rows(meta(batch, dtype=I32), nodes, nodes)
    length = meta(4, dtype=I32)
    for width in (1, 8, 64, 1024):
        yield rows.commit_rows(meta(4, width, dtype=I32), length, meta(70, dtype=I32))
    for batch, width in ((4, 5), (1, 1), (16, 16)):
        last, output = meta(batch, 1, dtype=I64), meta(batch, width, dtype=I64)
        yield rows.next_tokens(last, output, meta(batch, dtype=I32))


def _leave_step_calls() -> Iterator[Any]:
    # one sequence and plan off, too: what is 1 must not make another binary
    for batch, columns, width, drafts in ((4, 2, 5, 1), (1, 1, 1, None), (16, 16, 16, 2)):
        last, output = meta(batch, columns, dtype=I64), meta(batch, width, dtype=I64)
        length, results = meta(batch, dtype=I32), meta(batch, 2 + width + 2, dtype=I64)
        lens = None if drafts is None else meta(drafts, batch, dtype=I32)
        yield leave_step.leave_step(results, last, length, length, output, length, last, lens)


def _commit_kv_calls() -> Iterator[Any]:
    for dtype in (torch.bfloat16, torch.float32):
        for num_heads in (4, 8):
            slab = meta(2, 2, 300, 16, num_heads, 128, dtype=dtype)
            for num_moves in (1, 4, 8, 16, 64, 1024):
                moves = meta(4, num_moves, dtype=I32), meta(4, num_moves, dtype=I32)
                yield commit_kv.commit_kv(slab, *moves, meta(4, 100, dtype=I32))


def _cache_arguments(num_tokens: int, size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    cache = meta(300, 16, 8, size, dtype=dtype)
    table = meta(1, 256, dtype=I32)
    return cache, cache, meta(2, dtype=I32), meta(num_tokens, dtype=I32), table


def _block_mass_calls() -> Iterator[Any]:
    for dtype in FLOATS:
        sizes = (64, 80, 96, 128, 256)
        for size in (s for s in sizes if s <= block_mass.most_head_dim(dtype)):
            for words in (None, meta(5, 2, dtype=I64)):
                cache, _, starts, slot, table = _cache_arguments(5, size, dtype)
                mass = meta(4, 256, dtype=torch.float32)
                yield block_mass.block_mass(
                    heads(5, 8, size, dtype), cache, starts, meta(5, dtype=I64),
                    slot, meta(1, dtype=I32), words, table, mass, scale=0.125,
                )  # fmt: skip


def _write_kv_calls() -> Iterator[Any]:
    for dtype in FLOATS:
        for size in (64, 80, 96, 128, 256):
            for num_tokens in (1, 512):
                k = heads(num_tokens, 8, size, dtype)
                yield write_kv.write_kv(k, k, *_cache_arguments(num_tokens, size, dtype))


def _slab_rows_calls() -> Iterator[Any]:
    starts, table = meta(2, dtype=I32), meta(1, 256, dtype=I32)
    for dtype in FLOATS:
        slab = meta(300, 16, 3072, dtype=dtype)
        for num_tokens in (1, 512):
            slot = meta(num_tokens, dtype=I32)
            x = meta(num_tokens, 3072, dtype=dtype)
            yield slab_rows.write_rows(x, slab, starts, slot, table)
            yield slab_rows.take_rows(slab, slot.view(-1, 1), starts, table)


def rope_write_calls(stored: torch.dtype | None = None) -> Iterator[Any]:
    whole = ((64, 64), (80, 80), (96, 96), (128, 128), (256, 256))
    for dtype in FLOATS:
        for size, rotated in (*whole, (64, 16), (80, 32), (128, 64), (256, 64)):
            for num_tokens in (1, 512):
                k = heads(num_tokens, 8, size, dtype)
                cos = meta(num_tokens, rotated, dtype=dtype)
                norm = (*[meta(size, dtype=dtype)] * 2, 1e-6, False)
                extra = 0 if stored is None else SCALE_BYTES
                cache = _cache_arguments(num_tokens, size + extra, stored or dtype)
                places = cos, cos, *cache
                for transforms in (False, True)[: 1 + (stored is not None)]:
                    yield rope_write.rope_write(k, k, k, *places, transforms)
                    if (size, rotated) in rope_write.NORMED_SIZES:
                        yield rope_write.norm_rope_write(k, k, k, *norm, *places, transforms)


def _hadamard_calls() -> Iterator[Any]:
    for dtype in FLOATS:
        for size in hadamard.SIZES:
            yield hadamard.hadamard(heads(5, 8, size, dtype))


def _act_and_mul_calls() -> Iterator[Any]:
    for dtype in FLOATS:
        for activation in act_and_mul.ACTIVATIONS:
            for size in (64, 128, 256, 512, 11008):
                yield act_and_mul.act_and_mul(meta(5, 2 * size, dtype=dtype), activation)


def _rms_norm_calls() -> Iterator[Any]:
    for dtype in FLOATS:
        for size in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384):
            x, weight = meta(5, size, dtype=dtype), meta(size, dtype=dtype)
            yield rms_norm.rms_norm(x, weight, 1e-6)
            yield rms_norm.add_rms_norm(x, x, weight, 1e-6)


def _accept_winners_calls() -> Iterator[Any]:
    # the last tree is a chain
    trees = ((1, 0), (7, 4), (32, 6), (60, 7), (256, 10), (1024, 63), (1024, 1023))
    for num_nodes, max_depth in trees:
        tokens = meta(4, num_nodes, dtype=I64)
        parents = meta(4, num_nodes, dtype=I32)
        yield accept_winners.accept_winners(tokens, tokens, parents, max_depth)


def _tree_expand_calls() -> Iterator[Any]:
    for dtype in FLOATS:
        odd = (131071,) if dtype == torch.bfloat16 else ()
        for vocab in (32768, 131072, 262144, *odd):
            for num_children in (1, 2, 3, 4, 6, 8, 10, 16, 32, 64):
                yield tree_expand.tree_expand(meta(4, vocab, dtype=dtype), num_children)


def _merge_calls() -> Iterator[Any]:
    def tree(num_nodes: int) -> tuple[Tensor, Tensor]:
        return meta(4, num_nodes, dtype=I64), meta(4, num_nodes, dtype=I32)

    for num_trees, tree_nodes in ((2, 8), (2, 32), (3, 64), (4, 256)):
        yield merge.merge_trees(*tree(num_trees * tree_nodes), meta(num_trees + 1, dtype=I32))
    for num_candidates, num_nodes in ((43, 16), (511, 60), (1024, 256), (4096, 1024)):
        scores = meta(4, num_candidates, dtype=torch.float32)
        yield merge.rerank_tree(*tree(num_candidates), scores, num_nodes)
    for num_nodes in (8, 60, 256, 1024):
        yield merge.ancestor_words(tree(num_nodes)[1])


def _trees_calls() -> Iterator[Any]:
    for num_own, num_nodes in ((8, 15), (64, 127)):
        image = meta(4, num_own, dtype=I32)
        yield trees.image_slots(image, image[0], num_nodes)
        yield trees.image_slots(image, image, num_nodes)
    for num_drafts in (2, 3, 4, 8):
        weights = meta(4, num_drafts, dtype=torch.float32)
        yield trees.vote_chain(meta(4, num_drafts, 6, dtype=I64), weights)
    output, accepted = meta(4, 5, dtype=I64), meta(4, dtype=I32)
    yield trees.record_tokens(*_history_arguments(), output, accepted)


def _lookup_calls() -> Iterator[Any]:
    for num_tokens in (3, 4, 7, 15, 63, 1023):
        yield lookup.lookup(*_history_arguments(), 3, num_tokens)


def _history_arguments() -> tuple[Tensor, ...]:
    history, table = meta(300, 16, dtype=I32), meta(4, 100, dtype=I32)
    return history, table, meta(4, dtype=I32), meta(4, 2, dtype=I64)


CALLS: dict[str, Callable[[], Iterator[Any]]] = {
    "accept_winners": _accept_winners_calls,
    "act_and_mul": _act_and_mul_calls,
    "block_mass": _block_mass_calls,
    "commit_kv": _commit_kv_calls,
    "hadamard": _hadamard_calls,
    "leave_step": _leave_step_calls,
    "lookup": _lookup_calls,
    "merge": _merge_calls,
    "rms_norm": _rms_norm_calls,
    "rope_write": rope_write_calls,
    "rows": _rows_calls,
    "slab_rows": _slab_rows_calls,
    "tree_expand": _tree_expand_calls,
    "trees": _trees_calls,
    "write_kv": _write_kv_calls,
    **launches_attention.CALLS,
    **launches_typed.CALLS,
    **launches_products.CALLS,
    **launches_states.CALLS,
}
