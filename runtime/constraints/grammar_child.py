"""Grammars in a child process: what it survives, this process can compile as well."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specc.runtime.constraints.grammar_compile import (
    GrammarSource,
    Vocabulary,
    grammar_of,
    is_dead_end,
    matcher_of,
    refused,
)
from specc.runtime.processes.bounded_child import ChildLimits

if TYPE_CHECKING:
    from llguidance import LLMatcher

TARGET = "specc.runtime.constraints.grammar_child:GrammarChild"
# the library calls itself for each rule that another one names: about 3 KB of stack a rule
LIMITS = ChildLimits(
    cpu_seconds=2.0, memory_bytes=512 << 20, answer_bytes=32 << 20, stack_bytes=64 << 20
)
# what the same takes here, and as much again
STACK_BYTES = 2 * LIMITS.stack_bytes

# tokens that are tried, and what one of them may take
_NUM_TRIED = 8
_MAX_MASK_S = 0.25


class GrammarChild:
    """The function of a child: compiles a grammar and makes its first mask.

    Args:
        setup: the vocabulary, as `Vocabulary.to_data`.
    """

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._vocabulary = Vocabulary.from_data(setup)
        self._tokens = self._vocabulary.open()

    def __call__(self, data: list[Any]) -> dict[str, Any]:
        """The grammar as the library writes it, and what it holds of memory.

        Args:
            data: the fields of a `GrammarSource`.
        Returns:
            `grammar`; `bytes`, of what is compiled; `state_bytes`, of each request's place in it.
        Raises:
            RequestError: it cannot be compiled, or its first mask cannot be made.
        """
        source = GrammarSource(*data)
        grammar = grammar_of(source, self._tokens)
        begin = _allocated_bytes()
        matcher = matcher_of(source, grammar, self._tokens, self._vocabulary)
        matcher.compute_bitmask()
        if matcher.is_error():
            reason = matcher.get_error()
            raise refused(source, f"no token begins such an output ({reason})")
        middle = _allocated_bytes()
        own = matcher.deep_copy()
        self._walk(source, own)
        end = _allocated_bytes()
        return {"grammar": grammar, "bytes": middle - begin, "state_bytes": end - middle}

    def _walk(self, source: GrammarSource, matcher: LLMatcher) -> None:
        """Try a few tokens: the engine makes such masks while other requests wait.

        Raises:
            RequestError: one of them takes long, or the library gives up.
        """
        for number in range(1, _NUM_TRIED + 1):
            begin_s = time.thread_time()
            mask = matcher.compute_bitmask()
            token_id = _first_bit(mask)
            if token_id is None or token_id in self._vocabulary.ends.ids:
                break
            matcher.try_consume_tokens([token_id])
            if (seconds := time.thread_time() - begin_s) > _MAX_MASK_S:
                raise refused(source, f"mask {number} takes {seconds:.2f} s, which others wait for")
        # an output that ends without being complete is that request's, if its model goes there
        if matcher.is_error() and not is_dead_end(matcher):
            raise refused(source, f"too complex after {number} tokens: {matcher.get_error()}")


def _first_bit(mask: bytes) -> int | None:
    rest = mask.lstrip(b"\0")
    if not rest:
        return None
    return 8 * (len(mask) - len(rest)) + (rest[0] & -rest[0]).bit_length() - 1


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def _allocated_bytes() -> int:
    """Of native code; 0 where the C library does not tell."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)
