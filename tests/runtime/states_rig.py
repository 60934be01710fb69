"""A tiny target whose layers keep states, engines made of it by hand, and what states have to be.

Its projections are rounded sums of float64, and its states come before its attention, so that they
have the same bits however many tokens a pass has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specc.artifact.state_entry import StateGeometry
from specc.kernels import ops
from specc.passes.step.fuse_step import fuse_step
from specc.runtime.backends.eager.step import EagerStep
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.execution.shared_runner import SharedRunner
from specc.runtime.scheduling.kv_cache import CacheShape, KVCache
from specc.runtime.scheduling.request import Request
from specc.runtime.scheduling.state_slabs import (
    FoldOptions,
    StateShape,
    StateSizes,
    StateSlabs,
)
from specc.speculation.plans import OFF, SpecPlan, replay_rows

VOCAB, DIM, HEADS, HEAD_DIM, WIDTH, EOS = 61, 16, 2, 8, 4, 60
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 1, 2, 4, 8
# two convolutions of one geometry, a delta rule, and a decay of each row without correction
CONVS = StateGeometry("conv", (WIDTH - 1, DIM), DIM, "float32")
_SIZES = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
DELTA = StateGeometry(
    "recurrence", (VALUE_HEADS, KEY_DIM, VALUE_DIM), sum(_SIZES) + 2 * VALUE_HEADS, "float32",
    KEY_HEADS, True,
)  # fmt: skip
DECAYS = StateGeometry(
    "recurrence", (VALUE_HEADS, KEY_DIM, VALUE_DIM), sum(_SIZES) + VALUE_HEADS * KEY_DIM,
    "float32", KEY_HEADS, False,
)  # fmt: skip
SLABS = ((2, CONVS), (1, DELTA), (1, DECAYS))
# how far logits are from those of the last token alone, which is what the draft knows
_OWN = 0.6


def state_shapes() -> list[StateShape]:
    return [
        StateShape(
            count, x.shape, x.columns, torch.float32,
            None if x.kind == "conv" else FoldOptions(x.key_heads, x.has_beta),
        )
        for count, x in SLABS
    ]  # fmt: skip


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    """[N, O] float64 of rows [N, I] and [O, I]: rounded, it has the same bits for any N."""
    return (rows.double()[:, None] * weight.double()).sum(dim=2)


class Pairs(nn.Module):
    """[V] logits after a token, from it alone: a draft that is often right."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)) * 2
        self.table[:, EOS] = -20

    def forward(self, tokens: Tensor, *inputs: Any) -> Tensor:
        return self.table[tokens[inputs[6]]]


class HybridModel(nn.Module):
    """Convolution, delta rule, convolution, decays, then attention; weights from a seed."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

        self.embed = weight(VOCAB, DIM) * DIM**0.5
        self.convs = [weight(DIM, WIDTH), weight(DIM, WIDTH)]
        inner = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
        self.queries, self.keys = ([weight(inner[0], DIM) for _ in range(2)] for _ in range(2))
        self.values = [weight(inner[1], DIM) for _ in range(2)]
        self.decays = [weight(VALUE_HEADS, DIM), weight(VALUE_HEADS * KEY_DIM, DIM)]
        self.beta = weight(VALUE_HEADS, DIM)
        self.back = [weight(DIM, inner[1]) for _ in range(2)]
        self.attention = [weight(HEADS * HEAD_DIM, DIM) for _ in range(3)]
        self.head, self.pairs = weight(VOCAB, DIM), Pairs()
        self.head[EOS] = 0
        # keys and values; states and replay rows of each slab
        self.cache: tuple[Tensor, Tensor] | None = None
        self.slabs: list[tuple[Tensor, Tensor]] = []

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        q_start: Tensor,
        slot: Tensor,
        cache_len: Tensor,
        ancestors: Tensor | None,
        block_table: Tensor,
        logit_rows: Tensor,
        states: Tensor,
    ) -> Tensor:
        where = q_start, slot, cache_len, ancestors, states
        x = self.before_attention(tokens, where)
        q, k, v = (
            _product(x, w).float().view(len(tokens), HEADS, HEAD_DIM).transpose(0, 1)
            for w in self.attention
        )
        assert self.cache is not None
        out = ops.tree_attention(
            q, k, v, *self.cache, q_start, positions, slot, cache_len, ancestors, block_table,
            scale=HEAD_DIM**-0.5,
        )  # fmt: skip
        x = x + out.transpose(0, 1).reshape(len(tokens), -1)
        own = _product(nn.functional.layer_norm(x[logit_rows], (DIM,)), self.head).float()
        return self.pairs.table[tokens[logit_rows]] + _OWN * own * DIM**0.5

    def before_attention(self, tokens: Tensor, where: Sequence[Tensor | None]) -> Tensor:
        """What the layers that keep states make of tokens."""
        x = self.embed[tokens]
        for number in range(2):
            conv, rows = (part[number] for part in self.slabs[0])
            mixed = ops.tree_conv(
                x, self.convs[number], None, conv, rows, *where, activation="silu"
            )
            q, k = (
                nn.functional.normalize(_product(mixed, w[number]), dim=1).float()
                for w in (self.queries, self.keys)
            )
            v = _product(mixed, self.values[number]).float()
            g = -nn.functional.softplus(_product(mixed, self.decays[number])).float()
            beta = _product(mixed, self.beta).sigmoid().float() if number == 0 else None
            recurrence, rows = (part[0] for part in self.slabs[1 + number])
            count = len(tokens)
            out = ops.tree_recurrence(
                q.view(count, KEY_HEADS, KEY_DIM), k.view(count, KEY_HEADS, KEY_DIM),
                v.view(count, VALUE_HEADS, VALUE_DIM),
                g if number == 0 else g.view(count, VALUE_HEADS, KEY_DIM),
                beta, recurrence, rows, *where,
            )  # fmt: skip
            x = x + _product(out.flatten(1), self.back[number]).float()
        return x


class PlainStates:
    """States after tokens that come one by one, in their order, with nothing else at work."""

    def __init__(self) -> None:
        self._model = HybridModel()
        self._slabs = StateSlabs(state_shapes(), StateSizes(1, 1))
        self._model.slabs = list(zip(self._slabs.states, self._slabs.replay, strict=True))
        self._known: dict[tuple[int, ...], list[Tensor]] = {}

    @torch.inference_mode()
    def after(self, tokens: Sequence[int]) -> list[Tensor]:
        """Of each slab [L, …]."""
        key = tuple(tokens)
        if key not in self._known:
            if tokens[:-1]:
                for slab, known in zip(self._slabs.states, self.after(tokens[:-1]), strict=True):
                    slab[:, 0] = known
            length = torch.tensor([len(tokens) - 1], dtype=torch.int32)
            where = (
                torch.tensor([0, 1], dtype=torch.int32), length, length, None,
                torch.tensor([[0, 1]], dtype=torch.int32),
            )  # fmt: skip
            self._model.before_attention(torch.tensor(tokens[-1:]), where)
            self._known[key] = [slab[:, 0].clone() for slab in self._slabs.states]
        return self._known[key]

    def check(self, core: EngineCore) -> int:
        """Compare the states of all requests that run; returns how many there were."""
        count = 0
        for request in core.scheduler.running:
            if request.cache_len:
                self.check_request(core, request)
                count += 1
        return count

    def check_request(self, core: EngineCore, request: Request) -> None:
        """Compare the states of all models, of drafts with those of the tokens that they read."""
        cache = core.engine.cache
        of_target = [] if cache.states is None else [(cache.states, request.cache_len)]
        of_drafts = [(x, request.draft_lens[i]) for i, x in cache.draft_states.items()]
        for found, length in (*of_target, *of_drafts):
            wanted = self.after(request.token_ids[:length]) if length else found.states[:0]
            for slab, own in zip(found.states, wanted, strict=bool(length)):
                assert torch.equal(slab[:, request.state_place], own), (
                    f"{next(iter(found.environment))} of {request.request_id} are not those of its"
                    f" {length} tokens"
                )


def _bound(slabs: Sequence[Tensor], states: StateSlabs) -> HybridModel:
    model = HybridModel()
    model.cache = (slabs[0][0][0], slabs[0][0][1])
    model.slabs = list(zip(states.states, states.replay, strict=True))
    return model


def build_hybrid(
    plans: Sequence[SpecPlan],
    *,
    block_size: int = 4,
    max_num_seqs: int = 3,
    max_seq_len: int = 96,
    prefill_chunk: int = 16,
    num_checkpoints: int = 0,
    grid: int = 0,
    pool_blocks: int | None = None,
    drafts_itself: bool = False,
    is_hybrid: bool = True,
) -> Engine:
    """An engine of the tiny target and, where plans draft with a model, of `Pairs`.

    Where it `drafts_itself`, drafts are the tiny model, too, with states of their own; where it is
    not `is_hybrid`, the target is `Pairs`, which keeps no states.
    """
    plans = list(dict.fromkeys([OFF, *plans]))
    names = sorted({name for plan in plans for name in plan.model_names})
    max_nodes = max(1, *(plan.num_rows for plan in plans))
    shape = CacheShape(max_seq_len, max_nodes, block_size, max_num_seqs, pool_blocks)
    sizes = StateSizes(max_num_seqs, replay_rows(plans), num_checkpoints, grid)
    states = StateSlabs(state_shapes(), sizes) if is_hybrid else None
    of_drafts = {
        i: StateSlabs(state_shapes(), sizes, model=name)
        for i, name in enumerate(names if drafts_itself else ())
    }
    slab = (1, HEADS, HEAD_DIM)
    specs = {"target": [slab], **{name: [slab] for name in names}}
    cache = KVCache(shape, specs, torch.float32, states=states, draft_states=of_drafts)
    modules: dict[str, nn.Module] = {
        name: Pairs() if slabs is None else _bound(cache.slabs[name], slabs)
        for name, slabs in (("target", states), *((x, None) for x in names))
    }
    modules |= {names[i]: _bound(cache.slabs[names[i]], x) for i, x in of_drafts.items()}
    geometries = [geometry for _, geometry in SLABS]
    kept = {
        "states": geometries if is_hybrid else (),
        "draft_states": dict.fromkeys(names if drafts_itself else (), geometries),
    }
    steps = {}
    for plan in plans:
        made = fuse_step(plan, dict.fromkeys(modules, 1), block_size=block_size, **kept)
        steps[plan.name] = EagerStep(json.loads(json.dumps(made.to_json())), modules)
    return Engine(
        target=modules["target"],  # type: ignore[arg-type]
        drafts=[modules[name] for name in names],  # type: ignore[misc]
        steps=dict(steps),
        cache=cache,
        default_plan=plans[-1].name,
        prefill_chunk=prefill_chunk,
        vocab_size=VOCAB,
        position_limit=max_seq_len,
        eos_token_ids=frozenset(),
        runner_type=SharedRunner,
    )
