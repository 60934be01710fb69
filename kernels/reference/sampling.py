"""Oracles of sampling by counters, and of trees whose shape is data.

Random numbers are a pure function of (seed, offset, token): nothing is drawn in an order, so that
every rule, every lowering and every tree sees the same noise at the same place.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from specc.sampling.rows import MIN_TEMPERATURE as MIN_TEMPERATURE
from specc.speculation.tree import WORD_BITS, pack_bits

MASK = 0xFFFFFFFF
PHILOX_FACTORS = (0xD2511F53, 0xCD9E8D57)
PHILOX_STEPS = (0x9E3779B9, 0xBB67AE85)
# tokens that take the same word of consecutive counters, so that lanes read neighbours
LANES = 128
# second word of the counter: what the number is for; the last two are of a column of proposals
# and lie COLUMN_PURPOSES apart for neighboring ones
TOKEN_NOISE = 0
DRAW_NOISE = 1
UNIFORM = 2
COLUMN_PURPOSES = 8
LARGEST_UNIFORM = 1.0 - 2.0**-24
# bits of sqrt(1/2), and how far they lie below those of 1
SQRT_HALF = 0x3F3504F3
SQRT_HALF_TO_ONE = 0x3F800000 - SQRT_HALF
# log(1 + f) = f - f²/2 + f³ · polynomial, for sqrt(1/2) ≤ 1 + f < sqrt(2)
LOG_POLYNOMIAL = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
# log(2) in two parts, the first with few bits: its multiples are exact
LOG_TWO = (0.693359375, -2.12194440e-4)


def philox_reference(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox 4x32-10.

    Args:
        counter: four int64 tensors of 32-bit words.
        key: two.
    Returns:
        four int64 tensors of 32-bit words.
    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, §3.3 and §4.3.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # products of 32-bit words wrap in int64, and their bits are right all the same
        first, second = c0 * PHILOX_FACTORS[0], c2 * PHILOX_FACTORS[1]
        c0, c1, c2, c3 = (
            ((second >> 32) & MASK) ^ c1 ^ k0,
            second & MASK,
            ((first >> 32) & MASK) ^ c3 ^ k1,
            first & MASK,
        )
        k0, k1 = (k0 + PHILOX_STEPS[0]) & MASK, (k1 + PHILOX_STEPS[1]) & MASK
    return c0, c1, c2, c3


def gumbel_reference(
    seed: Tensor, offset: Tensor, tokens: Tensor, purpose: Tensor | int = TOKEN_NOISE
) -> Tensor:
    """Gumbel noise of tokens: a pure function of (seed, offset, purpose, token), to the last bit.

    Args:
        seed: int64, broadcast against the others.
        offset: int64, such as a position.
        tokens: int64 token ids.
        purpose: `TOKEN_NOISE`, or `purpose_of_column(DRAW_NOISE, column)`.
    Returns:
        float32 in (-3, 23): -log(-log(1 - w)), w the token's 32 bits as a fraction. Small
        exponentials, which decide an argmax over a large vocabulary, keep their relative precision.
    """
    what = torch.as_tensor(purpose, dtype=torch.int64, device=tokens.device)
    seed, offset, tokens, what = torch.broadcast_tensors(seed, offset, tokens, what)
    lane, word = tokens % LANES, tokens // LANES % 4
    counter = tokens // (4 * LANES) * LANES + lane
    words = _random_words(seed, offset, what, counter)
    w = _as_fraction(torch.stack(words).gather(0, word[None])[0])
    fraction, exponent = _split(1.0 - w)
    # next to 1 the difference above has lost what w still knows
    exponential = -_log(torch.where(exponent == 0, -w, fraction), exponent)
    return -_log(*_split(exponential))


def uniform_reference(seed: Tensor, offset: Tensor, column: Tensor) -> Tensor:
    """The number that decides whether a proposal is accepted.

    Args:
        seed: int64, broadcast against the others.
        offset: int64 position of the proposed token.
        column: int64 column of the proposal.
    Returns:
        float32 in (0, 1): word 0 of token counter 0 as a fraction.
    """
    seed, offset, column = torch.broadcast_tensors(seed, offset, column)
    purpose = purpose_of_column(UNIFORM, column)
    return _as_fraction(_random_words(seed, offset, purpose, torch.zeros_like(seed))[0])


def purpose_of_column(purpose: int, column: Tensor) -> Tensor:
    """Second word of the counter for `DRAW_NOISE` or `UNIFORM` of a column of proposals, int64."""
    return purpose + COLUMN_PURPOSES * column.long()


def _random_words(
    seed: Tensor, offset: Tensor, purpose: Tensor, counter: Tensor
) -> tuple[Tensor, ...]:
    key = (seed & MASK, (seed >> 32) & MASK)
    return philox_reference((counter, purpose, offset & MASK, (offset >> 32) & MASK), key)


def _as_fraction(bits: Tensor) -> Tensor:
    return (bits.float() * 2.0**-32 + 2.0**-33).clamp(max=LARGEST_UNIFORM)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """(f, e) with x = (1 + f) · 2^e and sqrt(1/2) ≤ 1 + f < sqrt(2); x is a normal float32."""
    bits = x.view(torch.int32) + SQRT_HALF_TO_ONE
    mantissa = (bits & 0x7FFFFF) + SQRT_HALF
    return mantissa.view(torch.float32) - 1.0, ((bits >> 23) - 127).float()


def _log(fraction: Tensor, exponent: Tensor) -> Tensor:
    """Natural logarithm in additions and multiplications alone, which all devices round alike.

    Source: logf of Cephes.
    """
    value = torch.full_like(fraction, LOG_POLYNOMIAL[0])
    for coefficient in LOG_POLYNOMIAL[1:]:
        value = value * fraction + coefficient
    square = fraction * fraction
    value = value * fraction * square + exponent * LOG_TWO[1] - square * 0.5
    return fraction + value + exponent * LOG_TWO[0]


def sample_reference(logits: Tensor, temperature: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    """One token a row, from softmax(logits / temperature): argmax(logits / temperature + noise).

    Args:
        logits: [R, V].
        temperature: [R] float32; below `MIN_TEMPERATURE`, and 0 above all, the row's argmax.
        seed: [R] int64.
        offset: [R] int64; rows of equal seed and offset share their noise.
    Returns:
        [R] int64; ties go to the lower token, NaN counts as largest.
    """
    wide = logits.float()
    noise = gumbel_reference(
        seed[:, None], offset[:, None], torch.arange(logits.shape[1], device=logits.device)[None]
    )
    is_sampled = temperature >= MIN_TEMPERATURE
    factor = torch.where(is_sampled, 1.0 / temperature, 1.0)
    scores = torch.where(is_sampled[:, None], wide * factor[:, None] + noise, wide)
    return scores.argmax(dim=-1)


def merge_trees_reference(
    tokens: Tensor, parents: Tensor, start: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The union of several drafts' trees: a node is its parent's node and its token.

    Args:
        tokens: [B, T] int64 nodes of S trees, one after the other.
        parents: [B, T] int32 ids within the tree, before the node's own; -1 at roots and at dead
            nodes.
        start: [S + 1] int32; tree s owns columns start[s] … start[s + 1] - 1, its root first. All
            roots are one node, the first tree's.
    Returns:
        tokens: [B, N] int64, N = 1 + T - S, in the order of first proposals; 0 at dead nodes, which
            come last.
        parents: [B, N] int32, -1 at the root and at dead nodes.
        image: [B, T] int32 merged node of each proposal, -1 for dead ones.
        count: [B, N] int32 proposals of each merged node: sampling rules need multiplicity.
    Source: SpecInfer, arXiv:2305.09781 §3.2.
    """
    batch, total = tokens.shape
    num_nodes = 1 + total - (start.shape[0] - 1)
    merged = torch.zeros(batch, num_nodes, dtype=torch.int64)
    merged_parents = torch.full((batch, num_nodes), -1, dtype=torch.int32)
    image = torch.full((batch, total), -1, dtype=torch.int32)
    count = torch.zeros(batch, num_nodes, dtype=torch.int32)
    for b in range(batch):
        nodes = {(-1, -1): 0}
        for first, last in itertools.pairwise(start.tolist()):
            for column in range(first, last):
                token, parent = int(tokens[b, column]), int(parents[b, column])
                if column == first:
                    key = (-1, -1)
                elif 0 <= parent < column - first and image[b, first + parent] >= 0:
                    key = (int(image[b, first + parent]), token)
                else:
                    continue
                if key not in nodes:
                    nodes[key] = len(nodes)
                node = nodes[key]
                if count[b, node] == 0:
                    merged[b, node], merged_parents[b, node] = token, key[0]
                image[b, column] = node
                count[b, node] += 1
    outputs = (merged, merged_parents, image, count)
    return tuple(output.to(tokens.device) for output in outputs)  # type: ignore[return-value]


def rerank_tree_reference(
    tokens: Tensor, parents: Tensor, scores: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The best nodes of a candidate tree, root included.

    Args:
        tokens: [B, M] int64, node 0 the root.
        parents: [B, M] int32, before the node's own id.
        scores: [B, M] float32 cumulative log probabilities: no node's is above its parent's. NaN
            counts as least. The root's is not looked at.
        num_nodes: N, 1 … M.
    Returns:
        tokens: [B, N] int64 in the order of the candidates.
        parents: [B, N] int32; -1 at the root, and where a score above its parent's has left the
            parent after it.
        kept: [B, N] int32 candidate that each node was.
    Source: EAGLE-2, arXiv:2406.16858 §4.2. Ties go to the earlier candidate, so every node that is
        kept keeps its parent.
    """
    values = torch.where(scores.isnan(), -float("inf"), scores)
    # below -inf: by NaN first, then by value; both sorts are stable
    order = values.sort(dim=1, descending=True, stable=True).indices
    behind = scores.gather(1, order).isnan().int()
    behind = torch.where(order == 0, -1, behind)
    order = order.gather(1, behind.sort(dim=1, stable=True).indices)
    kept = order[:, :num_nodes].sort(dim=1).values
    place = torch.full(tokens.shape, -1, dtype=torch.int64, device=tokens.device)
    place.scatter_(1, kept, torch.arange(num_nodes, device=tokens.device).expand_as(kept))
    old = parents.gather(1, kept).long()
    remapped = torch.where(old >= 0, place.gather(1, old.clamp(min=0)), -1)
    return tokens.gather(1, kept), remapped.int(), kept.int()


def ancestor_words_reference(parents: Tensor) -> tuple[Tensor, Tensor]:
    """What attention and positions need of trees whose shape is data.

    Args:
        parents: [B, N] int32, before the node's own id; -1 at the root and at dead nodes.
    Returns:
        words: [B * N, W] int64; bit j of word w: node 64w + j is an ancestor, or the node itself.
            Dead nodes have none.
        depths: [B * N] int32, 0 at the root and at dead nodes.
    """
    batch, num_nodes = parents.shape
    mask = torch.zeros(batch, num_nodes, num_nodes, dtype=torch.bool)
    for b, row in enumerate(parents.tolist()):
        for node, parent in enumerate(row):
            if parent >= 0:
                mask[b, node] = mask[b, parent]
            mask[b, node, node] = node == 0 or parent >= 0
    mask = mask.view(batch * num_nodes, num_nodes)
    words = pack_bits(mask)
    assert words.shape[1] == -(-num_nodes // WORD_BITS)
    depths = (mask.sum(dim=1) - 1).clamp(min=0).int()
    return words.to(parents.device), depths.to(parents.device)
