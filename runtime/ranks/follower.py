"""A rank that follows: it loads its part of the engine, and does what rank 0 orders until the end.

It has no scheduler, no tokenizer, no drafts and no sampling: a pass comes with all inputs, and what
rank 0 accepted comes as rows that the caches keep.
"""

from __future__ import annotations

import hashlib
import os
import platform
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specc.artifact.backends import backend_names, facts_of
from specc.artifact.directory import open_engine, unreplaced
from specc.artifact.manifest import MANIFEST_FILE, Manifest
from specc.errors import SpeccError

# importing this registers the operators that programs call
from specc.kernels import ops as _ops  # noqa: F401
from specc.kernels.ranks import rank_error
from specc.runtime.backends.base import LoadedPrograms, LoadLimits
from specc.runtime.backends.device_models import DeviceRanks
from specc.runtime.backends.offload_budget import least_of, offload_bytes
from specc.runtime.backends.program_files import load_operators
from specc.runtime.backends.registry import backend_of
from specc.runtime.ranks.answers import checksum, values_message
from specc.runtime.ranks.channel import Channel
from specc.runtime.ranks.device_stages import DeviceStages
from specc.runtime.ranks.followed_device import FollowedDevice, KeptDevice
from specc.runtime.ranks.followed_device_drafts import FollowedDeviceDrafts
from specc.runtime.ranks.followed_drafts import FollowedDrafts
from specc.runtime.ranks.open_group import open_group
from specc.runtime.ranks.order_checks import commit_of, copy_of, drawn_inputs, pass_inputs
from specc.runtime.ranks.orders import Kind, Message, json_message, json_of, refused
from specc.runtime.ranks.rank_group import (
    RankGroup,
    drawn_tokens,
    whole_logits,
    whole_votes,
)
from specc.runtime.ranks.rendezvous import Launched
from specc.runtime.ranks.signs import Signs
from specc.runtime.ranks.stage_groups import STAGED, StageGroups, place_of
from specc.runtime.ranks.stage_passes import StagePasses
from specc.speculation.plans import replay_rows
from specc.version import __version__

_ORDERS_BETWEEN_CHECKS = 64


def facts_about(path: Path) -> dict[str, str]:
    """What all ranks have to share: versions, and the engine.

    Raises:
        OSError: there is no manifest.
    """
    manifest = hashlib.sha256((path / MANIFEST_FILE).read_bytes()).hexdigest()
    return {
        "specc": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "engine": manifest[:16],
    }


class FollowedEngine:
    """The programs of a rank that follows, and its caches.

    Args:
        loaded: the models that it has, or has a part of, target first.
        group: of this rank.
        vocab_size: columns of the target's logits, of all ranks together.
        names: of models, by the numbers that orders have for them; some may be others'.
        lone: of the models, those that this rank alone has.
        drafts: with these.
        passes: where the target has stages.
    """

    def __init__(
        self,
        loaded: LoadedPrograms,
        group: RankGroup,
        vocab_size: int,
        names: Sequence[str],
        lone: Collection[str],
        drafts: FollowedDrafts,
        passes: StagePasses | None = None,
    ) -> None:
        self._passes = passes
        self._vocab_size = vocab_size
        self._loaded = loaded
        models = {**loaded.models, **loaded.self_drafts}
        self._models = [(name, models.get(name)) for name in names]
        self._lone, self._drafts = lone, drafts
        self._slabs, self._states = loaded.cache.slabs, loaded.cache.states
        self._operators = loaded.operators
        self._group = group
        self._num_orders = 0

    @torch.inference_mode()
    def follow(self, order: Message) -> Message | None:
        """Do what is ordered; returns what rank 0 waits for, if it does.

        Raises:
            FaultError: it is no order of this engine.
            RuntimeError: an operator refuses its inputs.
        """
        self._num_orders += 1
        if self._num_orders % _ORDERS_BETWEEN_CHECKS == 0:
            for weights in self._loaded.mapped_weights:
                weights.check()
        if order.model >= len(self._models):
            raise refused(f"an order for model {order.model} of {len(self._models)}")
        if order.kind is Kind.DRAFT:
            found = self._drafts.answer(order)
            return None if found is None else values_message(found, order.sequence)
        if order.kind is Kind.STATES:
            if self._states is None:
                raise refused("a copy of states of an engine without")
            self._states.repeat(copy_of(order), self._operators)
            return None
        name, model = self._models[order.model]
        if model is None:
            return None
        if self._passes is not None and order.kind in (Kind.PASS, Kind.DRAW):
            is_drawn = order.kind is Kind.DRAW
            draws, inputs = drawn_inputs(order) if is_drawn else (None, pass_inputs(order))
            self._passes.follow(model, inputs, draws)
            return None
        if order.kind is Kind.PASS and name in self._lone:
            logits = model(*pass_inputs(order))
            return values_message([logits], order.sequence) if len(logits) else None
        if order.kind is Kind.PASS:
            inputs = pass_inputs(order)
            whole_logits(self._group, model(*inputs), self._vocab_size)
            whole_votes(self._group, inputs)
        elif order.kind is Kind.DRAW:
            draws, inputs = drawn_inputs(order)
            logits = model(*inputs)
            drawn_tokens(self._group, logits, draws, self._vocab_size, self._operators)
            whole_votes(self._group, inputs)
        elif order.kind is Kind.COMMIT and name in self._slabs:
            self._commit(name, order)
        else:
            raise refused(f"{order.kind.name} among orders")
        return None

    def checksum(self) -> bytes:
        """Of the caches of the models that all ranks run; see `checksum`."""
        names = [name for name in self._loaded.models if name not in self._lone]
        states = [] if self._states is None else self._states.slabs
        return checksum([*(slab for name in names for slab in self._slabs[name]), *states])

    def _commit(self, name: str, order: Message) -> None:
        """As the last stage of a step does, see `passes/step/fuse_step.py`."""
        commit = commit_of(order)
        source, _ = self._operators.commit_rows(commit.path, commit.cache_len, commit.slots)
        places = torch.arange(commit.path.shape[1], dtype=torch.int32)
        target = commit.cache_len[:, None] + places
        for slab in self._slabs[name]:
            self._operators.commit_kv(slab, source, target, commit.block_table)
        if commit.states is None:
            return
        if self._states is None:
            raise refused(f"a commit of states of {name}, which keeps none")
        self._states.fold_all(source, commit.cache_len, commit.states, self._operators)


def follow(
    orders: Channel,
    signs: Channel,
    rank: int,
    parent: int | None = None,
    path: Path | None = None,
) -> int:
    """Load what rank 0 says, and follow its orders until the end.

    Args:
        orders: from rank 0.
        signs: of life, to and from it, and reports.
        rank: of this process.
        parent: process id of rank 0, where that has started this process.
        path: the engine directory; None is where rank 0 has it.
    Returns:
        the exit code of the process.
    """
    try:
        return _follow(orders, signs, rank, parent, path)
    except BaseException as error:
        if not isinstance(error, SpeccError | KeyboardInterrupt):
            traceback.print_exc()
        _report(signs, error)
        return 1


def follow_descriptors(rank: int, orders: int, signs: int) -> int:
    """Follow rank 0, which has started this process; see `follow`."""
    channels = [Channel(socket.socket(fileno=number)) for number in (orders, signs)]
    return follow(channels[0], channels[1], rank, os.getppid())


def _follow(
    orders: Channel, signs: Channel, rank: int, parent: int | None, path: Path | None
) -> int:
    # rank 0 gets them too, ends open requests in its own time, and then says so
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    first = orders.receive()
    if first is None:
        return 1
    if first.kind is not Kind.SETUP:
        raise refused(f"{first.kind.name} before SETUP")
    setup = json_of(first)
    torch.set_num_threads(setup["num_threads"])
    thread = Signs(signs, rank, setup["timeout_s"], setup["silence_s"], parent)
    thread.start()
    try:
        return _follow_orders(orders, signs, thread, setup, path, parent is not None)
    finally:
        thread.stop()


def _follow_orders(
    orders: Channel,
    signs: Channel,
    thread: Signs,
    setup: Mapping[str, Any],
    path: Path | None,
    is_started: bool,
) -> int:
    path = Path(setup["path"]) if path is None else path
    facts = {"pid": os.getpid(), "host": platform.node(), **facts_about(path)}
    signs.send(json_message(Kind.HELLO, facts))
    manifest = open_part(path, setup)
    if is_started:
        # rank 0 has started as many here as there are
        backend_of(setup["backend"]).take_device(setup["rank"], setup["num_ranks"])
    group: RankGroup
    if setup["group"] == STAGED:
        group = meet_stages(orders, signs, manifest, setup, is_started)
    else:
        sizes = (setup["rank"], setup["num_ranks"], setup["collective_timeout_s"])
        group = open_group(setup["group"], *sizes, place_of(manifest, setup["rank"]))
    thread.group = group
    engine = load_follower(path, manifest, setup, group)
    signs.send(Message(Kind.READY))
    while True:
        order = orders.receive()
        if order is None:
            # of rank 0's end, or of the job's, the other thread knows more
            thread.join()
            return 1
        if order.sequence != thread.done + 1:
            raise refused(f"order {order.sequence} after order {thread.done}")
        if order.kind is Kind.END:
            group.close()
            return 0
        if order.kind is Kind.CHECKSUM:
            parts = (torch.frombuffer(bytearray(engine.checksum()), dtype=torch.uint8),)
            signs.send(Message(Kind.SUM, parts, sequence=order.sequence))
        elif (answer := engine.follow(order)) is not None:
            orders.send(answer)
        thread.done = order.sequence


def meet_stages(
    orders: Channel,
    signs: Channel,
    manifest: Manifest,
    setup: Mapping[str, Any],
    is_started: bool,
) -> StageGroups:
    """The groups and links of a rank whose target has stages.

    Raises:
        FaultError: rank 0 says something else than how to open them.
        RankError: a rank is gone, or cannot be reached.
    """
    place = place_of(manifest, setup["rank"])
    assert place is not None
    launched = None if is_started else Launched.from_environment()
    local = range(setup["num_ranks"]) if launched is None else launched.local_ranks
    groups = StageGroups(place, local, setup["collective_timeout_s"])
    signs.send(json_message(Kind.OFFER, groups.offer()))
    said = orders.receive()
    if said is None or said.kind is not Kind.MEET:
        raise refused(f"{said.kind.name if said else 'the end'} before MEET")
    data = json_of(said)
    groups.meet(data["tickets"], data["address"], setup["start_timeout_s"])
    return groups


def open_part(path: Path, setup: Mapping[str, Any]) -> Manifest:
    """The manifest, compared with this machine; a cut engine's operators are loaded.

    Args:
        path: the engine directory.
        setup: as rank 0 says.
    Raises:
        EngineError: see `Engine.load`.
    """
    with unreplaced(path):
        manifest = open_engine(
            path,
            setup["verify"],
            backend=setup["backend"],
            backends=backend_names(),
            max_num_seqs=setup["max_num_seqs"],
            kv_cache_tokens=setup["kv_cache_tokens"],
            weights_budget=least_of(setup["offload_weights"]),
        )
        if manifest.parallel is not None:
            # collectives are among them
            load_operators()
    return manifest


def load_follower(
    path: Path, manifest: Manifest, setup: Mapping[str, Any], group: RankGroup
) -> FollowedEngine | FollowedDevice:
    """A follower's programs and caches, and what does rank 0's orders with them.

    Args:
        path: the engine directory.
        manifest: of the engine.
        setup: as rank 0 says.
        group: of this rank.
    Raises:
        EngineError: see `Engine.load`.
    """
    vocab_size = manifest.models[0].vocab_size
    if not facts_of(setup["backend"]).is_captured:
        loaded, rank = load_part(path, manifest, setup), setup["rank"]
        lone = {name: loaded.models[name] for name in manifest.drafts_of(rank)}
        drafts = FollowedDrafts(path, manifest, lone, rank, loaded.operators)
        names, passes = manifest.ordered_programs, None
        if isinstance(group, StageGroups):
            passes = StagePasses(group, manifest.stages, vocab_size, loaded.operators)
        return FollowedEngine(loaded, group, vocab_size, names, lone, drafts, passes)
    kept = KeptDevice()
    loaded = load_part(path, manifest, setup, kept)
    within, rank, homes = kept.models.within, setup["rank"], manifest.draft_homes
    own = {name: within[name] for name in manifest.drafts_of(rank)}
    parts = FollowedDeviceDrafts(path, manifest, own, rank, kept.graphs.device)
    names, stages = manifest.ordered_programs, DeviceStages.of(manifest, rank, group)
    return FollowedDevice(kept, loaded.cache, group, vocab_size, names, homes, parts, stages)


def load_part(
    path: Path, manifest: Manifest, setup: Mapping[str, Any], ranks: DeviceRanks | None = None
) -> LoadedPrograms:
    """A follower's programs and caches: its part of the models that all ranks run, and its drafts.

    Args:
        path: the engine directory.
        manifest: of the engine.
        setup: as rank 0 says.
        ranks: gets what is loaded, for backends that capture.
    Raises:
        EngineError: see `Engine.load`.
    """
    rank = setup["rank"]
    names = (*manifest.led_models, *manifest.drafts_of(rank))
    if not setup["checks_weights"]:
        manifest = manifest.unchecked()
    part = replace(manifest.of_rank(rank).part_of(names), plans=())
    limits = LoadLimits(
        setup["max_num_seqs"],
        setup["kv_cache_tokens"],
        None,
        rank,
        ranks,
        setup["offload_weights"],
        setup["num_local"],
        setup["mmap"],
        replay_rows=replay_rows([entry.plan for entry in manifest.plans]),
    )
    # of what is free, rank 0's drafts take their share, too
    limits = replace(limits, offload_weights=offload_bytes(manifest, limits))
    with unreplaced(path):
        return backend_of(setup["backend"]).load(path, part, limits)


def _report(signs: Channel, error: BaseException) -> None:
    """Tell rank 0 why this rank ends."""
    # what a collective says inside a program comes as torch's error
    error = rank_error(error) or error
    if isinstance(error, SpeccError):
        data = {"found": error.found, "needed": error.needed, "do": error.do}
    else:
        lines = str(error).strip().splitlines()
        found = ": ".join([type(error).__name__, *lines[:1]])
        data = {"found": found, "needed": "a rank that works", "do": "see what it wrote before"}
    try:
        signs.send(json_message(Kind.ERROR, data))
    except OSError:
        print(f"rank 0 is gone; this rank ends with {data['found']}", file=sys.stderr)
