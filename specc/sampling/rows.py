"""Sampling options of a batch as row data: what every sequence brings to a step, in two tensors.

One acceptance path serves all requests of a batch: rule, temperature, filters, penalties and seed
are columns, so requests of any kind mix freely and no plan is compiled for one of them.
"""

from __future__ import annotations

from enum import IntEnum

# below it, the reciprocal may not be finite, and sampling is argmax in all but name
MIN_TEMPERATURE = 1e-5


class Rule(IntEnum):
    """How a tree is drawn and verified; each is lossless for its own type of tree.

    coupled: children are the best of log q + g, one Gumbel vector g a position; y = argmax of
        log P + g, and the walk follows y. A seed's tokens are the same with any tree and without.
    delta: children are the draft's most likely tokens, whatever the seed; the walk is the same.
    mss: children are drawn from q, independently, and kept with multiplicity; each is tried against
        the residual of the target (SpecInfer, arXiv:2305.09781, algorithm 2).
    swor: children are drawn from q without replacement and tried in draw order, with q renormalized
        (Sequoia, arXiv:2402.12374 §3.2).
    """

    COUPLED = 0
    DELTA = 1
    MSS = 2
    SWOR = 3


RULES = tuple(rule.name.lower() for rule in Rule)


class Value(IntEnum):
    """Columns of `sampling_values`, [B, 6] float32; 0, 1, 0, 1, 0, 0 is greedy decoding."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    REPETITION = 3
    PRESENCE = 4
    FREQUENCY = 5


class Word(IntEnum):
    """Columns of `sampling_words`, [B, 4] int64; top_k 0 is no limit, rule a `Rule`.

    Tokens at positions from num_prompt on are output, which presence and frequency count.
    """

    SEED = 0
    TOP_K = 1
    RULE = 2
    NUM_PROMPT = 3
