"""What launches of all kernels of `specc::attend` share: their call, its checks, what ships."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from specc.artifact.kv_rows import holds_quantized
from specc.kernels.cuda.arrivals import counters
from specc.kernels.cuda.attend_config import SHORT_ROWS, AttendConfig, Work, plan_work
from specc.kernels.cuda.launch import is_even
from specc.kernels.cuda.shipped import Shipped, Types
from specc.kernels.cuda.strided_rows import check, check_dense, check_tensors
from specc.kernels.reference.kv_rows import columns_of
from specc.speculation.tree import WORD_BITS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# sequences, or tokens, that one step of a search looks at
SEARCH = 64
# what engines are built with: dense rows (one page) or pages of 16 rows
SHIPPED_PAGES = ((1, 4096), (256, 16))
# arguments of every kernel that say where tokens and keys are
PLACES = ("q_start", "position", "slot", "cache_len", "ancestors", "block_table")
# tensors in the dtype of queries
ROWS = ("q", "k_cache", "v_cache")
_TENSORS = (*ROWS, *PLACES, "sink_logits", "slopes")


@dataclass(frozen=True)
class AttendCall:
    """Arguments of a call of `specc::attend`, and what kernels are told of their shapes.

    Args:
        q: [H, Nt, D].
        k_cache: [blocks, block_size, HK, D].
        v_cache: [blocks, block_size, HK, DV]; None of latents: the first DV columns of keys, which
            have one head, are the values.
        value_dim: DV.
        q_start: [B + 1] int32.
        position: [Nt] int64.
        slot: [Nt] int32.
        cache_len: [B] int32.
        ancestors: [Nt, W] int64, or None.
        block_table: [B, n] int32.
        scale: of scores.
        window: 0 is no limit.
        sink: first keys that no window cuts.
        num_splits: of the keys of every tile; None: chosen by lengths.
        sink_logits: [H] scores without values in the dtype of q, or None.
        softcap: of scores; 0 is none.
        slopes: [H] float32, or None.
        rounds_bias: positions and their products with slopes are bfloat16.
        chunk: positions; 0 is no limit.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor | None
    value_dim: int
    q_start: Tensor
    position: Tensor
    slot: Tensor
    cache_len: Tensor
    ancestors: Tensor | None
    block_table: Tensor
    scale: float
    window: int = 0
    sink: int = 0
    num_splits: int | None = None
    sink_logits: Tensor | None = None
    softcap: float = 0.0
    slopes: Tensor | None = None
    rounds_bias: bool = False
    chunk: int = 0

    @classmethod
    def of(cls, *tensors: Tensor | None, values_in_keys: bool = False, **named: Any) -> AttendCall:
        """Of the arguments of `specc::attend`, in its order or by name."""
        given: dict[str, Any] = dict(zip(_TENSORS, tensors, strict=False)) | named
        value_dim = columns_of(given["v_cache"])
        if values_in_keys:
            given["v_cache"] = None
        return cls(value_dim=value_dim, **given)

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.q.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return self.q.shape[1]

    @property
    def head_dim(self) -> int:
        """Columns of queries and keys."""
        return self.q.shape[2]

    @property
    def num_seqs(self) -> int:
        """Sequences, padding among them."""
        return self.block_table.shape[0]

    @property
    def num_pages(self) -> int:
        """Blocks of a sequence."""
        return self.block_table.shape[1]

    @property
    def block_size(self) -> int:
        """Rows of a block."""
        return self.k_cache.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Heads of the cache."""
        return self.k_cache.shape[2]

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def capacity(self) -> int:
        """Rows of the cache that a sequence may have."""
        return self.num_pages * self.block_size

    @property
    def mean_rows(self) -> int:
        """Packed rows of a sequence (its tokens × `group`), in the mean."""
        return triton.cdiv(self.num_tokens, self.num_seqs) * self.group

    @property
    def tokens_each(self) -> int:
        """Tokens of each sequence if all have equally many, else 0: `q_start` says."""
        is_given = is_even() and self.num_tokens % self.num_seqs == 0
        return self.num_tokens // self.num_seqs if is_given else 0

    @property
    def places(self) -> tuple[Tensor | float, ...]:
        """Arguments `PLACES`, and the scale."""
        return (
            self.q_start, self.position, self.slot, self.cache_len,
            # absent, some tensor
            self.q_start if self.ancestors is None else self.ancestors,
            self.block_table, self.scale,
        )  # fmt: skip

    @property
    def beside(self) -> dict[str, Any]:
        """What every kernel takes and not every call has."""
        found = {} if self.sink_logits is None else {"sinks": self.sink_logits}
        return found | ({"softcap": float(self.softcap)} if self.softcap else {})

    @property
    def all_beside(self) -> dict[str, Any]:
        """The same with slopes and chunks, which not every kernel takes."""
        slopes = {"slopes": self.slopes, "ROUNDS": self.rounds_bias}
        found = self.beside | ({} if self.slopes is None else slopes)
        return found | ({"CHUNK": self.chunk} if self.chunk else {})

    @property
    def sizes(self) -> tuple[int, ...]:
        """Arguments num_words, num_blocks, num_pages, block_size and tokens_each."""
        num_words = 0 if self.ancestors is None else self.ancestors.shape[1]
        return num_words, self.k_cache.shape[0], self.num_pages, self.block_size, self.tokens_each

    @property
    def strides(self) -> tuple[int, ...]:
        """Of queries: of heads and tokens; of keys, then of values: of blocks, rows and heads."""
        values = self.k_cache if self.v_cache is None else self.v_cache
        return *self.q.stride()[:2], *self.k_cache.stride()[:3], *values.stride()[:3]

    @property
    def stride_words(self) -> int:
        """From a token's words to those of the next."""
        return 0 if self.ancestors is None else self.ancestors.stride(0)

    def page(self, block_n: int) -> int:
        """Rows of a page for steps of so many keys: see `page_rows`."""
        return page_rows(self.num_pages, self.block_size, block_n)

    def has_whole_pages(self, block_n: int) -> bool:
        """Whether every block of so many keys has whole pages, or lies in one."""
        return self.page(block_n) in (0, 16, 32)

    def plan(self, c: AttendConfig, num_sms: int, *, is_prompt: bool) -> Work:
        """How keys are handed out to programs of such tiles."""
        num_tiles = self.num_seqs * triton.cdiv(self.mean_rows, c.block_m)
        most_tiles = self.num_tokens * self.group // c.block_m + self.num_seqs
        return plan_work(
            num_tiles, num_tiles if self.tokens_each else most_tiles,
            self.num_kv_heads, self.num_seqs, c.programs_per_sm * num_sms,
            triton.cdiv(self.capacity, c.block_n) // c.min_blocks,
            num_splits=self.num_splits,
            is_prompt=is_prompt,
            is_short=self.capacity <= SHORT_ROWS,
        )  # fmt: skip

    def parts(
        self, num_parts: int, block_m: int, num_counters: int, columns: int = 0
    ) -> tuple[Tensor, ...]:
        """Memory for the parts of split tiles that the last program of a tile merges.

        Args:
            columns: of a part; 0 is DV.

        Returns:
            rows [num_parts, block_m, columns] and the logarithms [num_parts, block_m] of their
            sums, float32, and counters of programs; empty without parts.
        """
        if not num_parts:
            # absent, in the type they have else: one kernel for both
            absent = self.q.new_empty(0, dtype=torch.float32)
            return absent, absent, self.q.new_empty(0, dtype=torch.int32)
        lse = self.q.new_empty(num_parts, block_m, dtype=torch.float32)
        shape = num_parts, block_m, columns or self.value_dim
        partial = self.q.new_empty(shape, dtype=torch.float32)
        return partial, lse, counters(self.k_cache, num_counters)

    def check_places(self) -> None:
        """Refuse what every kernel would misread; shapes of queries and caches are checked.

        Raises:
            ValueError: naming what was found and what was needed.
        """
        dtypes = [x.dtype for x in (self.q, self.k_cache, self.v_cache) if x is not None]
        # no latents
        is_quantized = self.v_cache is not None and holds_quantized(self.k_cache.dtype)
        check(
            dtypes[0] in DTYPES and len(set(dtypes[1:] if is_quantized else dtypes)) == 1,
            "attend",
            f"q and caches of {', '.join(map(str, dtypes))}",
            f"one dtype of {', '.join(map(str, DTYPES))}, or quantized rows of keys and values",
        )
        check(
            self.q_start.shape == (self.num_seqs + 1,) and self.cache_len.shape == (self.num_seqs,),
            "attend",
            f"q_start {tuple(self.q_start.shape)}, cache_len {tuple(self.cache_len.shape)},"
            f" block_table {tuple(self.block_table.shape)}",
            "[B + 1], [B] and [B, n]",
        )
        check(
            self.position.shape == (self.num_tokens,) == self.slot.shape,
            "attend",
            f"position {tuple(self.position.shape)} and slot {tuple(self.slot.shape)}",
            f"[{self.num_tokens}]",
        )
        self._check_words()
        check_dense("attend", **{name: getattr(self, name) for name in (*ROWS, *PLACES)})
        check(self.scale > 0, "attend", f"scale {self.scale}", "a positive one")
        is_right = 0 <= self.softcap < math.inf
        check(is_right, "attend", f"a softcap of {self.softcap}", "0 or more")
        for name, of_heads, dtype in (
            ("sinks", self.sink_logits, self.q.dtype),
            ("slopes", self.slopes, torch.float32),
        ):
            if of_heads is not None:
                check_tensors("attend", dtype, (self.num_heads,), **{name: of_heads})

    def _check_words(self) -> None:
        words = self.ancestors
        if words is None:
            return
        check(
            words.dtype == torch.int64 and words.shape[0] == self.num_tokens,
            "attend",
            f"ancestors {words.dtype} {tuple(words.shape)}",
            f"int64 [{self.num_tokens}, W]",
        )
        num_nodes = words.shape[1] * WORD_BITS
        check(
            self.num_tokens <= self.num_seqs * num_nodes,
            "attend",
            f"{self.num_tokens} tokens of {self.num_seqs} sequences and words for {num_nodes} nodes"
            " of each",
            "a bit for every node",
        )


def padded(size: int) -> int:
    """Columns of a tile: a power of two, and what tensor cores take at least."""
    return max(16, triton.next_power_of_2(size))


def page_rows(num_pages: int, block_size: int, block_n: int) -> int:
    """Rows of a page; 0 if none ends in a key block: whole key blocks, or a page that holds all."""
    return 0 if num_pages == 1 or block_size % block_n == 0 else block_size


def shipped_pages(
    name: str, kernel: Any, dtype: torch.dtype, block_n: int, rows: tuple[str, ...], **given: Any
) -> Iterator[Shipped]:
    """A kernel for the pages that engines have, with ancestors and without.

    Args:
        name: what all names begin with.
        block_n: keys of a step.
        rows: names of tensors in `dtype`.
        given: as of `Shipped.of`.
    """
    # where key blocks are no longer than pages, paged and dense caches are the same
    for page in sorted({page_rows(*sizes, block_n) for sizes in SHIPPED_PAGES}):
        for is_tree in (True, False):
            yield Shipped.of(
                f"{name}-page{page}-{'tree' if is_tree else 'causal'}",
                kernel, {dtype: rows}, types_of(is_tree), PAGE=page, IS_TREE=is_tree, **given,
            )  # fmt: skip


def types_of(is_tree: bool = True) -> Types:
    """Types of what kernels take beside `ROWS` and a result.

    Without ancestors `q_start` stands in their place.
    """
    integers = ("q_start", "slot", "cache_len", "block_table", "arrived")
    types: Types = {torch.float32: ("partial", "lse", "sums"), float: ("scale",)}
    if is_tree:
        return types | {torch.int32: integers, torch.int64: ("position", "ancestors")}
    return types | {torch.int32: (*integers, "ancestors"), torch.int64: ("position",)}
