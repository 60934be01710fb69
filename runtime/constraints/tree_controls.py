"""Controls of requests along their trees: biases and forbidden tokens at every node."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specc.runtime.execution.link import Link, to_device
from specc.runtime.scheduling.request import Request


def reads_trees(requests: Sequence[Request]) -> bool:
    """Whether what may follow a node depends on more than on whose it is."""
    return any(
        s.controls is not None
        and bool(s.controls.num_tokens_read or s.controls.depends_on_depth(s.num_output_tokens))
        for s in requests
    )


def control_trees(
    logits: Tensor,
    requests: Sequence[Request],
    tokens: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
    link: Link | None = None,
) -> Tensor:
    """The logits of B trees, as the controls of their requests change them.

    Where they leave a node no token, all that they and grammars forbid are equally likely: a walk
    goes on over finite numbers, and `Request.append` refuses what it brings.

    Args:
        logits: [B * N, V]; -inf at what grammars forbid.
        requests: B requests; the last token of each is its tree's root, or follows now (N = 1).
        tokens: [B][N] token of each node; node 0 is the root.
        parents: [B][N], -1 at the root and at dead nodes; both are looked at where `reads_trees`.
        link: with one, nothing waits for the device.
    Returns:
        [B * N, V], new; or the same where no request has active controls.
    """
    own = [b for b, request in enumerate(requests) if request.has_active_controls]
    if not own:
        return logits
    size, vocab_size = logits.shape[0] // len(requests), logits.shape[1]
    device = logits.device
    rows: list[Tensor] = []
    with_row: list[int] = []
    places: list[int] = []
    banned: list[int] = []
    for i, b in enumerate(own):
        request, controls = requests[b], requests[b].controls
        assert controls is not None, "its controls are active"
        if (row := controls.row(device, link)) is not None:
            rows.append(row)
            with_row.append(i)
        count = request.num_output_tokens
        if controls.num_tokens_read or controls.depends_on_depth(count):
            width = controls.num_tokens_read
            ends = ends_of(request.output_tail(width), width, tokens[b], parents[b])
            for node, (end, depth) in ends.items():
                found = controls.forbidden(end, count + depth)
                places += [i * size + node] * len(found)
                banned += found
    indices = [torch.tensor(x, dtype=torch.int64) for x in (own, with_row, places, banned)]
    index, biased, at, forbidden = to_device(indices, device, link)
    trees = logits.view(-1, size, vocab_size)
    # a copy, in which a bias is not rounded before it is added
    changed = trees[index].float()
    if rows:
        changed[biased] += torch.stack(rows)[:, None]
    flat = changed.view(-1, vocab_size)
    if banned:
        flat[at, forbidden] = -torch.inf
    is_dead = flat.amax(dim=-1, keepdim=True) == -torch.inf
    flat.masked_fill_(is_dead, 0.0)
    return trees.index_copy(0, index, changed.to(logits.dtype)).view_as(logits)


def ends_of(
    tail: Sequence[int], width: int, tokens: Sequence[int], parents: Sequence[int]
) -> dict[int, tuple[tuple[int, ...], int]]:
    """Node → the end of the output down to it, and its depth; without nodes off the tree.

    Args:
        tail: of the output at the root, at most `width` tokens.
        width: tokens that an end has, where there are so many.
        tokens: [N]; that of the root is not looked at.
        parents: [N], each before its children.
    """
    ends = {0: (tuple(tail), 0)}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if node and parent in ends:
            above, depth = ends[parent]
            ends[node] = ((*above, token)[-width:] if width else (), depth + 1)
    return ends
