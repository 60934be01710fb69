"""A rank that follows with a device: it does the work that rank 0 orders, and replays graphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from specc.kernels.cuda.launch import even_tokens
from specc.runtime.backends.captured.device_models import DeviceModels
from specc.runtime.backends.captured.graph_device import Graph, GraphDevice
from specc.runtime.ranks.checksum import checksum
from specc.runtime.ranks.device_work import PassWork, Work, take, works_of
from specc.runtime.ranks.orders import Kind, Message, refused
from specc.runtime.ranks.rank_group import (
    NUM_INPUTS,
    RankGroup,
    own_votes,
    whole_logits,
    whole_votes,
)
from specc.runtime.scheduling.kv_cache import KVCache


class KeptDevice:
    """See `DeviceRanks`: keeps what a follower loads, which changes nothing about it."""

    def __init__(self) -> None:
        self.graphs: GraphDevice
        self.models: DeviceModels

    def join(self, graphs: GraphDevice, models: DeviceModels) -> tuple[GraphDevice, DeviceModels]:
        """See `DeviceRanks.join`."""
        self.graphs, self.models = graphs, models
        return graphs, models


class FollowedDevice:
    """The models of a rank that follows, on its device, and graphs that rank 0 has it capture.

    An order is done when the device has done it: rank 0 drafts meanwhile, for the next one.

    Args:
        kept: the device and the models that all ranks run, target first.
        cache: of them.
        group: of this rank.
        vocab_size: columns of the target's logits, of all ranks together.
    """

    def __init__(self, kept: KeptDevice, cache: KVCache, group: RankGroup, vocab_size: int) -> None:
        # the target's second programs are the last ones
        self._models = list(kept.models.within.values())
        self._graphs = kept.graphs
        self._slabs = [cache.slabs[name] for name in kept.models.between]
        self._group = group
        self._vocab_size = vocab_size
        self._captured: list[Graph] = []

    @torch.inference_mode()
    def follow(self, order: Message) -> None:
        """Do what is ordered, and wait for it; rank 0 waits for no answer.

        Raises:
            FaultError: it is no order of this engine.
            RuntimeError: the device fails.
        """
        with self._graphs.active():
            if order.kind is Kind.WORK and len(order.tensors) == 1:
                self._do(works_of(order.tensors[0]))
            elif order.kind is Kind.CAPTURE and len(order.tensors) == 2:
                self._check_number(order, len(self._captured))
                run = partial(self._do, works_of(order.tensors[1]))
                self._captured.append(self._graphs.capture(run))
            elif order.kind is Kind.REPLAY and len(order.tensors) == 1:
                self._captured[self._check_number(order)].replay()
            else:
                raise refused(f"{order.kind.name} of {len(order.tensors)} tensors among orders")
            self._graphs.record_event().synchronize()

    def checksum(self) -> bytes:
        """Of the caches of the models that all ranks run; see `checksum`."""
        return checksum([slab for slabs in self._slabs for slab in slabs])

    def _check_number(self, order: Message, wanted: int | None = None) -> int:
        """The number of the graph that an order is about."""
        (value, *_) = order.tensors
        if value is None or value.dtype != torch.int64 or value.shape != (1,):
            raise refused(f"{order.kind.name} without a number")
        number = int(value)
        is_known = number == wanted if wanted is not None else 0 <= number < len(self._captured)
        if not is_known:
            raise refused(f"{order.kind.name} of graph {number} after {len(self._captured)} graphs")
        return number

    @torch.inference_mode()
    def _do(self, works: Sequence[Work]) -> None:
        for work in works:
            if work.model >= len(self._models):
                raise refused(f"work of model {work.model} of {len(self._models)}")
            given = take(work.specs, self._graphs.device)
            if isinstance(work, PassWork):
                if len(given) > NUM_INPUTS:
                    given[NUM_INPUTS] = own_votes(given[NUM_INPUTS])
                with even_tokens(work.is_even):
                    logits = self._models[work.model](*given)
                whole_logits(self._group, logits, self._vocab_size)
                whole_votes(self._group, given)
                continue
            if work.model >= len(self._slabs):
                raise refused(f"rows of model {work.model}, which has no caches of its own")
            for slab in self._slabs[work.model]:
                torch.ops.specc.commit_kv(slab, *given)
