"""On-policy training of a draft: greedy text of the target, and the loss along it.

Greedy speculative decoding only ever visits the target's own greedy text, so that is where a
draft must agree with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specc.fit.optimizer import Optimizer, Schedule, autocast

TOP_K = 32  # teacher probabilities kept for each on-policy position
CONTEXT, CONTINUATION = 96, 144  # tokens of an on-policy prompt and of its greedy continuation
BATCH = 32  # rows of a training step
STEPS_BETWEEN_REPORTS = 20


class Pool(NamedTuple):
    """Prompts with the target's greedy continuations, and what the target thought of each token.

    Args:
        tokens: [rows, length] token ids: a prompt, then its continuation but for the last token.
        ids: [rows, length, k] the target's best next tokens at every position, best first.
        odds: [rows, length, k] their probabilities, of which the rest of the vocabulary is missing.
        context: tokens of a prompt; position context - 1 is the first that a draft continues.
    """

    tokens: Tensor
    ids: Tensor
    odds: Tensor
    context: int


@torch.no_grad()
def continue_greedily(target: PreTrainedModel, prompts: Tensor, length: int = CONTINUATION) -> Pool:
    """Continue prompts of one length, [rows, context], by ``length`` tokens."""
    cache = DynamicCache(config=target.config)
    tokens, step = prompts, prompts
    ids, odds = [], []
    for _ in range(length):
        logits = target(input_ids=step, past_key_values=cache).logits.float()
        top = logits.softmax(-1).topk(min(TOP_K, logits.shape[-1]))
        ids.append(top.indices.to(torch.int32))
        odds.append(top.values.to(torch.bfloat16))
        step = top.indices[:, -1:, 0]
        tokens = torch.cat([tokens, step], 1)
    return Pool(tokens[:, :-1], torch.cat(ids, 1), torch.cat(odds, 1), prompts.shape[1])


def draw_prompts(stream: Tensor, newline: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw prompts from training files, each cut at a line end."""
    ends = (stream == newline).nonzero().flatten() + 1
    ends = ends[ends > CONTEXT]
    chosen = ends[torch.randint(len(ends), (count,), generator=generator)]
    return torch.stack([stream[end - CONTEXT : end] for end in chosen])


def build_pool(
    target: PreTrainedModel, stream: Tensor, newline: int, batch: int, seed: int, schedule: Schedule
) -> Pool:
    """Let the target continue prompts from training files, in as many batches as scheduled."""
    generator = torch.Generator().manual_seed(seed)
    batches: list[Pool] = []
    while schedule.progress(len(batches)) < 1.0:
        batches.append(continue_greedily(target, draw_prompts(stream, newline, batch, generator)))
        if len(batches) % 10 == 1:
            seconds = time.monotonic() - schedule.start
            print(f"pool: {len(batches)} batches in {seconds:.0f} s", flush=True)
    tokens, ids, odds = (
        torch.cat(part).clone()
        for part in zip(*((p.tokens, p.ids, p.odds) for p in batches), strict=True)
    )
    return Pool(tokens, ids, odds, batches[0].context)


def policy_losses(
    logits: Tensor, pool: Pool, rows: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compare a draft with the target on some rows of the pool.

    Args:
        logits: [n, length, vocabulary] of the draft.
        pool: what the target computed.
        rows: [n] rows of the pool that the logits belong to.
        weights: [n, length] of the positions, 0 or more; None weighs all alike.
    Returns:
        The loss, a scalar, in which a position of weight 0 has no part; and the draft's divergence
        from the target at every position, [n, length] nats, without gradient and unweighted.
    """
    log_probs = logits.float().log_softmax(-1)
    odds = pool.odds[rows].float()
    odds /= odds.sum(-1, keepdim=True)
    student = log_probs.gather(-1, pool.ids[rows].long())
    kl = (odds * (odds.clamp_min(1e-9).log() - student)).sum(-1)
    # The KL term keeps the whole distribution, which sampling needs; the other term asks for the
    # target's first choice, which greedy decoding needs.
    first = student[:, pool.context - 1 :, 0]
    if weights is None:
        return kl.mean() - first.mean(), kl.detach()
    own = weights[:, pool.context - 1 :]
    # a batch may hold no position that counts
    total, own_total = (part.sum().clamp_min(1e-6) for part in (weights, own))
    return (kl * weights).sum() / total - (first * own).sum() / own_total, kl.detach()


def train_on_policy(
    draft: PreTrainedModel,
    pool: Pool,
    seed: int,
    schedule: Schedule,
    report: Callable[[int, int, float], None],
    weights: Tensor | None = None,
    rates: tuple[float, float] = (0.01, 3e-3),
    use_compile: bool = False,
) -> int:
    """Teach a draft, in place, the target's choices along the target's own greedy text.

    Args:
        draft: in float32, with the target's token map.
        pool: text and teacher.
        seed: of the order of the rows.
        schedule: of the learning rates; it also ends the training.
        report: called now and then with the step, the tokens seen, and the mean divergence at the
            continuations' positions in nats, weighted as the loss is.
        weights: [rows, length] of the pool's positions; None weighs all alike.
        rates: peak learning rates of Muon and of AdamW.
        use_compile: run the draft through torch.compile.
    Returns:
        Steps taken.
    """
    fast = torch.compile(draft) if use_compile else draft
    optimizer = Optimizer(draft, *rates)
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)
    step, batch = 0, min(BATCH, len(pool.tokens))
    while schedule.progress(step) < 1.0:
        if len(order) < batch:
            order = torch.randperm(len(pool.tokens), generator=generator)
        rows, order = order[:batch], order[batch:]
        with autocast():
            logits = fast(input_ids=pool.tokens[rows], use_cache=False).logits
        own = None if weights is None else weights[rows]
        loss, kl = policy_losses(logits, pool, rows, own)
        loss.backward()
        optimizer.step(schedule.scale(step))
        step += 1
        if step % STEPS_BETWEEN_REPORTS == 0:
            kl = kl[:, pool.context - 1 :]
            if own is not None:
                own = own[:, pool.context - 1 :]
                kl = (kl * own).sum() / own.sum().clamp_min(1e-6)
            report(step, step * batch * pool.tokens.shape[1], kl.mean().item())
    return step
