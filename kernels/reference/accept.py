"""Oracles of typed trees: how children are drawn from a draft, and how a tree is verified.

A row of logits becomes a distribution in one way for all models (`process_reference`); which
noise decides what is in `specc.kernels.reference.sampling`. Position p of a sequence has one Gumbel
vector for tokens, and for each column of proposals one more and one uniform: those that decide
which token stands at p. A walk that ends at position p has looked at none of a later position, so
the next step's are fresh, whatever its plan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specc.kernels.reference.processing import penalize_reference, process_reference
from specc.kernels.reference.sampling import (
    DRAW_NOISE,
    MIN_TEMPERATURE,
    TOKEN_NOISE,
    gumbel_reference,
    purpose_of_column,
    uniform_reference,
)
from specc.sampling.rows import Rule, Value, Word

TRIED_RULES = (Rule.MSS, Rule.SWOR)


def draft_children_reference(
    logits: Tensor,
    num_children: int,
    cache_len: Tensor,
    columns: Tensor,
    depth: int,
    values: Tensor,
    words: Tensor,
    scored: bool = False,
) -> tuple[Tensor, Tensor]:
    """Children of each frontier node of one depth, drawn as the sequence's rule says.

    Greedy rows and delta: the best logits, as `tree_expand_reference`. The others process the
    draft's logits as the target's, without penalties. Coupled: the best of s + the token noise of
    their position. MSS: each child is an independent draw with the noise of its own column. SWOR:
    the best of s + the noise of the first child's column, in descending order, which is the order
    of drawing without replacement. Equal ones by ascending id, tokens of probability 0 last.

    Args:
        logits: [B * F, V] draft logits of F frontier nodes a sequence.
        num_children: k, 1 … V.
        cache_len: [B] int32 committed rows; the root stands at this position. Negative rows are
            padding: any tokens come out.
        columns: [F] int32 proposal column of each node's first child; child r has that + r.
        depth: of the frontier, 0 at the root.
        values: [B, 6] float32, see `specc.sampling.rows.Value`.
        words: [B, 4] int64, see `specc.sampling.rows.Word`.
        scored: whether scores are wanted.
    Returns:
        tokens: [B * F, k] int64.
        scores: [B * F, k] float32 log_softmax of what was ranked, at the tokens: the logits for
            greedy rows and delta, s + noise for coupled, and s for the two that draw;
            [B * F, 0] where not wanted.
    Source: SpecInfer, arXiv:2305.09781 §3 (MSS); Sequoia, arXiv:2402.12374 §3.2 (SWOR).
    """
    rows, vocab = logits.shape
    frontier = columns.shape[0]
    values, words = (rows_.repeat_interleave(frontier, dim=0) for rows_ in (values, words))
    offset = (cache_len.long() + depth + 1).repeat_interleave(frontier)[:, None]
    seed, rule = words[:, Word.SEED, None], words[:, Word.RULE, None]
    first = columns.repeat(rows // frontier)[:, None]
    ids = torch.arange(vocab, device=logits.device)
    is_plain = (values[:, Value.TEMPERATURE, None] < MIN_TEMPERATURE) | (rule == Rule.DELTA)
    if bool(is_plain.all()):
        # graphs run on oracles, too, and noise takes a hundred times as long as this
        scores = coupled = logits.float()
        order = scores.sort(dim=1, descending=True, stable=True).indices
        tokens = order[:, :num_children].contiguous()
    else:
        scores = torch.where(is_plain, logits.float(), process_reference(logits, values, words))

        def noise(purpose: Tensor | int) -> Tensor:
            return gumbel_reference(seed, offset, ids, purpose)

        # noise takes longest: of what rows can be ranked by, only what some row is
        rules = {*rule[~is_plain].tolist()}
        coupled = ranked = scores
        if rules - {Rule.MSS, Rule.SWOR}:
            coupled = ranked = torch.where(is_plain, scores, scores + noise(TOKEN_NOISE))
        if Rule.SWOR in rules:
            swor = scores + noise(purpose_of_column(DRAW_NOISE, first))
            ranked = torch.where(~is_plain & (rule == Rule.SWOR), swor, coupled)
        tokens = best = ranked.sort(dim=1, descending=True, stable=True).indices[:, :num_children]
        if Rule.MSS in rules:
            draws = [
                (scores + noise(purpose_of_column(DRAW_NOISE, first + child))).argmax(dim=1)
                for child in range(num_children)
            ]
            tokens = torch.where(~is_plain & (rule == Rule.MSS), torch.stack(draws, dim=1), best)
        tokens = tokens.contiguous()
    if not scored:
        return tokens, scores.new_empty(rows, 0)
    is_drawn = (rule == Rule.MSS) | (rule == Rule.SWOR)
    measure = torch.where(is_drawn, scores, coupled)
    return tokens, measure.log_softmax(dim=1).gather(1, tokens)


def accept_reference(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    max_depth: int,
    image: Tensor | None,
    q_rows: Tensor | None,
    draft_logits: list[Tensor],
    values: Tensor,
    words: Tensor,
    cache_len: Tensor,
    history: Tensor,
    block_table: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk each tree from its root: what comes out is distributed as the target alone.

    The target's logits at a node are penalized by all tokens down to it, then processed. Greedy
    rows go to the child with the argmax; coupled and delta to the one with y = argmax(s + token
    noise), which does not depend on the tree. MSS and SWOR try the proposals of the node's children
    one after the other, by ascending column (`_try_proposals`). Where no child is entered, the
    token that was wanted, or a sample of what rejections left of P, is put out, and the walk ends.

    Args:
        logits: [B * N, V] target logits of all nodes.
        tokens: [B, N] int64 token of each node; node 0 is the root. A node whose token is below 0
            is dead, too: no walk enters it, and nobody tries it. (In steps that a device replays
            dead nodes have no parent; CUDA's operator does not look for such tokens.)
        parents: [B, N] int32, -1 at the root and at dead nodes; may be expanded over B.
        max_depth: levels below the root that are walked.
        image: [B, T] int32 node of each proposal column, -1 for dead ones: equal proposals of one
            node keep their multiplicity. None is the identity, T = N.
        q_rows: [T] int32 row of draft logits that a column was drawn from; -1 where nothing was
            drawn: the proposal has probability 1. None is -1 throughout. Only MSS and SWOR look.
        draft_logits: [B * F, V] each; frontier nodes are counted through the list, so that with
            n nodes a sequence before, row n + f is row b * F + f.
        values: [B, 6] float32, see `specc.sampling.rows.Value`.
        words: [B, 4] int64, see `specc.sampling.rows.Word`.
        cache_len: [B] int32 committed rows; the root stands at this position. Negative rows are
            padding: nothing is read, the root alone is accepted and token 0 put out.
        history: [blocks, block_size] int32 tokens before the root; read where there are penalties.
        block_table: [B, n] int32; position p is in block block_table[b, p // block_size].
    Returns:
        path: [B, max_depth + 1] int32 accepted node ids from the root on, then -1.
        num_accepted: [B] int32 accepted draft tokens, bonus not counted.
        output_tokens: [B, max_depth + 1] int64 accepted tokens and the last one, then -1.
    Source: SpecInfer, arXiv:2305.09781 algorithm 2; Sequoia, arXiv:2402.12374 algorithm 2.
    """
    batch, num_nodes = tokens.shape
    device = tokens.device
    if image is None:
        image = torch.arange(num_nodes, device=device).expand(batch, -1)
    drawn_from = [-1] * image.shape[1] if q_rows is None else q_rows.tolist()
    path = torch.full((batch, max_depth + 1), -1, dtype=torch.int32, device=device)
    output = torch.full((batch, max_depth + 1), -1, dtype=torch.int64, device=device)
    path[:, 0] = 0
    target = logits.view(batch, num_nodes, -1)
    for b, length in enumerate(cache_len.tolist()):
        if length < 0:
            output[b, 0] = 0
            continue
        drafts = [rows.view(batch, -1, rows.shape[1])[b] for rows in draft_logits]
        options = values[b], words[b]
        context = _context_of(history, block_table[b], length, values[b])
        node, depth = 0, 0
        while depth <= max_depth:
            context = torch.cat([context, tokens[b, node, None]])
            scores = _scores_of(target[b, node], context, options)
            is_child = parents[b] == node
            is_child[0] = False
            is_child &= depth < max_depth
            is_child &= tokens[b] >= 0
            offset = torch.tensor(length + depth + 1, device=device)
            if words[b, Word.RULE] in TRIED_RULES and _is_sampled(values[b]):
                proposals = [
                    (column, int(image[b, column]), drawn_from[column])
                    for column in range(image.shape[1])
                    if image[b, column] > 0 and is_child[image[b, column]]
                ]
                entered, token = _try_proposals(
                    scores, proposals, tokens[b], drafts, options, offset
                )
            else:
                token = _winner_of(scores, options, offset)
                following = (is_child & (tokens[b] == token)).nonzero()
                entered = int(following[0]) if len(following) else None
            output[b, depth] = token
            if entered is None:
                break
            node, depth = entered, depth + 1
            path[b, depth] = node
    return path, (path[:, 1:] >= 0).sum(dim=1).int(), output


def node_winners_reference(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    first_node: int,
    values: Tensor,
    words: Tensor,
    cache_len: Tensor,
    history: Tensor,
    block_table: Tensor,
) -> Tensor:
    """Token that the target puts out after each node of a tile, whatever its children carry.

    That is where `accept_reference` goes on from a node under greedy, coupled and delta; rows of
    MSS and SWOR get the target's own token, too, which is no walk of theirs.

    Args:
        logits: [B * T, V] target logits of nodes first_node … first_node + T - 1 of each sequence.
        tokens: [B, N] int64 token of each node; node 0 is the root.
        parents: [B, N] int32, -1 at the root and at dead nodes; may be expanded over B.
        first_node: 0 … N - T.
        values: [B, 6] float32, see `specc.sampling.rows.Value`.
        words: [B, 4] int64, see `specc.sampling.rows.Word`.
        cache_len: [B] int32 committed rows; the root stands at this position. Negative rows are
            padding.
        history: [blocks, block_size] int32 tokens before the root; read where there are penalties.
        block_table: [B, n] int32; position p is in block block_table[b, p // block_size].
    Returns:
        [B * T] int64; -1 for nodes that hang below no root, and for padding.
    """
    batch = len(tokens)
    winners = torch.full((logits.shape[0],), -1, dtype=torch.int64, device=tokens.device)
    size = logits.shape[0] // max(batch, 1)
    for b, length in enumerate(cache_len.tolist()):
        if length < 0:
            continue
        options = values[b], words[b]
        before = _context_of(history, block_table[b], length, values[b])
        for i in range(size):
            path = _path_to(first_node + i, parents[b].tolist())
            if not path:
                continue
            context = torch.cat([before, tokens[b, path]])
            scores = _scores_of(logits[b * size + i], context, options)
            offset = torch.tensor(length + len(path), device=tokens.device)
            winners[b * size + i] = _winner_of(scores, options, offset)
    return winners


def column_winners_reference(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    first: int,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """The target's own token among some columns of its logits, and how good it is.

    Of all parts of a vocabulary, the token of the largest score, among equal ones the smallest,
    is what `node_winners_reference` finds for rows without penalties and filters.

    Args:
        logits: [R, C] target logits of tokens first … first + C - 1.
        temperature: [R] float32; below `MIN_TEMPERATURE` a row is greedy.
        seeds: [R] int64 of the rows' requests.
        positions: [R] int64 of the tokens that are drawn.
        first: token of the first column.
        vocab_size: columns of tokens from this one on are padding.
    Returns:
        scores: [R] float32: the logit of greedy rows, of others logit · (1 / temperature) + noise.
        tokens: [R] int64. Without a column that counts: -inf, and vocab_size.
    """
    count = min(max(vocab_size - first, 0), logits.shape[1])
    if count == 0:
        empty = torch.full(temperature.shape, -torch.inf, device=temperature.device)
        return empty, torch.full_like(seeds, vocab_size)
    is_sampled = (temperature >= MIN_TEMPERATURE)[:, None]
    factor = torch.where(is_sampled, 1.0 / temperature[:, None], 1.0)
    scores = logits[:, :count].float() * factor
    ids = torch.arange(first, first + count, device=logits.device)
    noise = gumbel_reference(seeds[:, None], positions[:, None], ids)
    scores = torch.where(is_sampled, scores + noise, scores)
    best = scores.argmax(dim=1, keepdim=True)
    return scores.gather(1, best)[:, 0], best[:, 0] + first


def _path_to(node: int, parents: list[int]) -> list[int]:
    """Nodes from the root down to a node; empty where it hangs below none."""
    path = [node]
    while path[0] != 0:
        above = parents[path[0]]
        if not 0 <= above < len(parents) or len(path) == len(parents):
            return []
        path.insert(0, above)
    return path


def _try_proposals(
    scores: Tensor,
    proposals: list[tuple[int, int, int]],
    tokens: Tensor,
    drafts: list[Tensor],
    options: tuple[Tensor, Tensor],
    offset: Tensor,
) -> tuple[int | None, int]:
    """Accept the first proposal x with u · q(x) ≤ P(x), or sample from what rejections left of P.

    A rejection takes q from P. Under SWOR the next proposal of the same row of draft logits was
    drawn without those before it, so these get probability 0 in q.

    Args:
        scores: [V] processed scores of the target.
        proposals: (column, node, row of draft logits or -1) in the order of columns.
        tokens: [N] int64 of the tree.
        drafts: [F, V] logits each, of this sequence.
        options: values [6] and words [4].
        offset: position of the token.
    Returns:
        the node that was accepted or None, and the token that is put out.
    """
    words = options[1]
    target_probs = scores.softmax(dim=0)
    tried: dict[int, list[int]] = {}
    for column, node, row in proposals:
        token = int(tokens[node])
        if row < 0:
            draft_probs = torch.zeros_like(target_probs)
            draft_probs[token] = 1.0
        else:
            draft_probs = _process_row(torch.cat(drafts)[row], options).softmax(dim=0)
            if words[Word.RULE] == Rule.SWOR:
                draft_probs[tried.get(row, [])] = 0.0
                draft_probs = draft_probs / draft_probs.sum()
        # also where nothing is left of q, which is 0 / 0
        if not draft_probs[token] > 0:
            continue
        tried.setdefault(row, []).append(token)
        uniform = uniform_reference(words[Word.SEED], offset, words.new_tensor(column))
        rest = (target_probs - draft_probs).clamp(min=0.0)
        # a rejection that leaves nothing is the rounding of P = q
        if uniform * draft_probs[token] <= target_probs[token] or rest.sum() == 0:
            return node, token
        target_probs = rest / rest.sum()
    return None, int((target_probs.log() + _token_noise(scores, words, offset)).argmax())


def _scores_of(row: Tensor, context: Tensor, options: tuple[Tensor, Tensor]) -> Tensor:
    """A row of target logits after penalties of the tokens down to it, processed."""
    values, words = options
    if _has_penalty(values):
        row = penalize_reference(row, context, int(words[Word.NUM_PROMPT]), values)
    return _process_row(row, options)


def _winner_of(scores: Tensor, options: tuple[Tensor, Tensor], offset: Tensor) -> int:
    """The target's own token: the argmax, of sampled rows with the token noise."""
    values, words = options
    if _is_sampled(values):
        scores = scores + _token_noise(scores, words, offset)
    return int(scores.argmax())


def _process_row(row: Tensor, options: tuple[Tensor, Tensor]) -> Tensor:
    values, words = options
    return process_reference(row[None], values[None], words[None])[0]


def _token_noise(scores: Tensor, words: Tensor, offset: Tensor) -> Tensor:
    ids = torch.arange(scores.shape[0], device=scores.device)
    return gumbel_reference(words[Word.SEED], offset, ids)


def _is_sampled(values: Tensor) -> bool:
    return bool(values[Value.TEMPERATURE] >= MIN_TEMPERATURE)


def _has_penalty(values: Tensor) -> bool:
    """Whether any penalty differs from what changes nothing."""
    names = (Value.REPETITION, Value.PRESENCE, Value.FREQUENCY)
    return [float(values[name]) for name in names] != [1.0, 0.0, 0.0]


def _context_of(history: Tensor, blocks: Tensor, length: int, values: Tensor) -> Tensor:
    """The first tokens of a sequence, [length] int64; none where no penalty asks for them."""
    position = torch.arange(length if _has_penalty(values) else 0, device=history.device)
    block_size = history.shape[1]
    return history[blocks.long()[position // block_size], position % block_size].long()
