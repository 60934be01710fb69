"""What goes into a step of any backend, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from torch import Tensor


class StepResult(NamedTuple):
    """What one step did for its B sequences.

    Args:
        num_accepted: [B] accepted draft tokens.
        output_tokens: [B][P] accepted tokens, bonus token, then -1.
        next_cache_len: [B] committed rows of the target.
        draft_lens: draft → [B] committed rows of it.
        stage_s: seconds of each stage.
        values: what was asked for by name, as it is before the next step.
        live: [B] nodes of each tree that were verified, where a device found out; else ().
    """

    num_accepted: list[int]
    output_tokens: list[list[int]]
    next_cache_len: list[int]
    draft_lens: dict[int, list[int]]
    stage_s: dict[str, float]
    values: dict[str, Tensor] = {}  # noqa: RUF012  a tuple's default, never changed
    live: tuple[int, ...] = ()


class StepInputs(NamedTuple):
    """What the host brings to a step of B sequences.

    Args:
        rows: of each sequence, its last C tokens, and its committed rows.
        block_table: [B, n] int32.
        sampling_values: [B, 6] float32, see `specc.sampling.rows`.
        sampling_words: [B, 4] int64.
        extra: what only some plans read: `vote_weights` [B, S] float32, `proposals` [B, L] int64,
            `chosen_blocks` [B, C] int64 columns of the block table; and of a step that a device
            replays, where not all nodes are verified, `live` [B] int32 nodes of each tree that are,
            or at most may be. Where layers keep states, `states` [B, 2] int32 of all plans; where
            those of drafts do, `draft_states` [B, 2], and `seen_by_<draft>` [B] of each. Where
            the target has adapters, `adapters` [B] int32.
        mask_drafts: changes what drafts find likely; steps that a device replays take it
            from `StepExtras` instead.
    """

    rows: Sequence[Sequence[int]]
    block_table: Tensor
    sampling_values: Tensor
    sampling_words: Tensor
    extra: Mapping[str, Tensor] = MappingProxyType({})
    mask_drafts: MaskDrafts | None = None


class Drafted(NamedTuple):
    """A step whose tree is there, and whose nodes somebody else passes through the target.

    Args:
        values: what the stages so far have computed, by name.
        accept: runs the rest, once; given `logits` [B * N, V] of the nodes (and `tokens` [B, 1]
            of off), and names of values that the caller wants to see.
    """

    values: Mapping[str, Tensor] | StepValues
    accept: Callable[[Mapping[str, Tensor], Sequence[str]], StepResult]


class StepValues(Protocol):
    """Named values of a step in progress, for hooks: read them, or put others in their place."""

    def __getitem__(self, name: str, /) -> Tensor: ...

    def __setitem__(self, name: str, value: Tensor, /) -> None: ...


# in what the host brings: the places of sequences in the states, and how many nodes are certain
STATES = "states"
# the same of drafts, for nodes after the committed ones
DRAFT_STATES = "draft_states"
# the number [B] int32 of each sequence's adapter, -1 for none
ADAPTERS = "adapters"
# called after each pass of a draft with its inputs, as of `ModelProgram.forward`, and its logits
# [R, V]; returns the logits that children are drawn from, and that acceptance takes for q
MaskDrafts = Callable[[Sequence[Tensor | None], Tensor], Tensor]
# called between verification and acceptance
BeforeAccept = Callable[[StepValues], object]


def seen_by(draft: str) -> str:
    """Environment name of the tokens [B] int32 of each sequence that a draft's states have seen."""
    return f"seen_by_{draft}"


def slots_of(draft: str) -> str:
    """Environment name of the rows after the committed ones in which a draft holds the nodes."""
    return f"slot_of_{draft}"
