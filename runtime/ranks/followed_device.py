"""A rank that follows with a device: it does the work that rank 0 orders, and replays graphs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from specc.kernels.cuda.launch import even_tokens
from specc.runtime.backends.device_models import DeviceModels
from specc.runtime.backends.graph_device import Graph, GraphDevice
from specc.runtime.ranks.answers import checksum, values_message
from specc.runtime.ranks.device_drafts import described, gathered, logit_bytes
from specc.runtime.ranks.device_stages import DeviceStages
from specc.runtime.ranks.device_work import DraftWork, PassWork, TakeWork, Work, take, works_of
from specc.runtime.ranks.followed_device_drafts import FollowedDeviceDrafts
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
        kept: the device and the models that this rank has, or has a part of, target first.
        vocab_size: columns of the target's logits, of all ranks together.
        names: of models, by the numbers that orders have for them; some may be others'.
        lone: of the models, those that one rank alone has.
        stages: of the target, where it has several.
    """

    def __init__(
        self,
        kept: KeptDevice,
        cache: KVCache,
        group: RankGroup,
        vocab_size: int,
        names: Sequence[str],
        lone: Collection[str],
        drafts: FollowedDeviceDrafts,
        stages: DeviceStages | None = None,
    ) -> None:
        self._stages = stages
        self._models = [(name, kept.models.within.get(name)) for name in names]
        self._graphs = kept.graphs
        self._slabs = cache.slabs
        self._group = group
        self._vocab_size = vocab_size
        self._lone, self._drafts = lone, drafts
        # of this rank's part of the draft stage that was begun last
        self._found: list[Tensor | int] | None = None
        self._captured: list[Graph] = []
        # of graphs that begin a stage whose values a later graph takes, as where drafts of rank 0
        # obey a grammar: a graph keeps none of what it reads. Other graphs write to that memory,
        # too, so these replay with no other in between
        self._held: list[list[Tensor | int] | None] = []

    @torch.inference_mode()
    def follow(self, order: Message) -> Message | None:
        """Do what is ordered, and wait for it; returns what rank 0 waits for, if it does.

        Raises:
            FaultError: it is no order of this engine.
            RuntimeError: the device fails.
        """
        with self._graphs.active():
            if order.kind is Kind.WORK and len(order.tensors) == 1:
                works = works_of(order.tensors[0])
                self._do(works)
            elif order.kind is Kind.CAPTURE and len(order.tensors) == 2:
                self._check_number(order, len(self._captured))
                captured = works_of(order.tensors[1])
                self._captured.append(self._graphs.capture(partial(self._do, captured)))
                if _leaves_values(captured):
                    self._held.append(self._found)
            elif order.kind is Kind.REPLAY and len(order.tensors) == 1:
                self._captured[self._check_number(order)].replay()
            else:
                raise refused(f"{order.kind.name} of {len(order.tensors)} tensors among orders")
            self._graphs.record_event().synchronize()
        is_asked = order.kind is Kind.WORK and any(isinstance(x, DraftWork) for x in works)
        if is_asked and self._found is not None:
            return values_message(described(self._found), order.sequence)
        return None

    def checksum(self) -> bytes:
        """Of the caches of the models that all ranks run; see `checksum`."""
        names = [name for name, _ in self._models if name in self._slabs]
        return checksum([x for name in names if name not in self._lone for x in self._slabs[name]])

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
        device = self._graphs.device
        for work in works:
            if isinstance(work, DraftWork):
                self._found = self._drafts.run(work)
                continue
            if isinstance(work, TakeWork):
                found = [x for x in self._found or [] if isinstance(x, Tensor)]
                gathered(found, work.num_bytes, device)
                continue
            if work.model >= len(self._models):
                raise refused(f"work of model {work.model} of {len(self._models)}")
            name, model = self._models[work.model]
            given = take(work.specs, device)
            if isinstance(work, PassWork) and name in self._lone:
                logits = []
                if model is not None:
                    with even_tokens(work.is_even):
                        logits = [model(*given).float()]
                if work.rows:
                    gathered(logits, logit_bytes(work, self._vocab_size), device)
                continue
            if isinstance(work, PassWork) and self._stages is not None:
                assert model is not None
                with even_tokens(work.is_even):
                    self._stages.follow(model, given)
                continue
            if isinstance(work, PassWork):
                for mass in given[NUM_INPUTS:]:
                    assert mass is not None
                    given[NUM_INPUTS] = own_votes(mass)
                assert model is not None
                with even_tokens(work.is_even):
                    columns = model(*given)
                whole_logits(self._group, columns, self._vocab_size)
                whole_votes(self._group, given)
                continue
            if name not in self._slabs and name not in self._lone:
                raise refused(f"rows of model {work.model}, which has no caches of its own")
            for slab in self._slabs.get(name, []):
                torch.ops.specc.commit_kv(slab, *given)


def _leaves_values(works: Sequence[Work]) -> bool:
    """The last draft stage that is begun among them is not taken there."""
    kinds = [type(work) for work in works if isinstance(work, DraftWork | TakeWork)]
    return bool(kinds) and kinds[-1] is DraftWork
