"""How an engine of several ranks is loaded: as rank 0, which starts the others, or as one of them.

Where a launcher has started all ranks (`torchrun`), nobody is started here: RANK 0 leads, and the
others follow it over TCP, see `rendezvous.py`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import torch

from specc.artifact.backends import backend_names, facts_of
from specc.artifact.manifest import Manifest
from specc.errors import ConfigError, EngineError
from specc.kernels.reference.ranks import has_group
from specc.runtime.backends.base import LoadedPrograms, LoadLimits
from specc.runtime.backends.offload_budget import least_of
from specc.runtime.backends.program_files import load_operators, read_json
from specc.runtime.backends.registry import backend_of
from specc.runtime.backends.step import Model, StagedStep, Step
from specc.runtime.execution.draws import DrawnPrograms
from specc.runtime.execution.shared_runner import SharedRunner, StagedRunner
from specc.runtime.processes.fork_server import interpreter
from specc.runtime.ranks.channel import Channel
from specc.runtime.ranks.follower import facts_about, follow
from specc.runtime.ranks.job import Follower, Job
from specc.runtime.ranks.leader import Leader, end_job
from specc.runtime.ranks.led_drafts import led_drafts, led_plans
from specc.runtime.ranks.led_model import LedModel, LoneDraft
from specc.runtime.ranks.led_models import LedDevice
from specc.runtime.ranks.led_step import DrawnStep, LedStep
from specc.runtime.ranks.open_group import make_group
from specc.runtime.ranks.rank_group import Copies, Gathering, RankGroup, joined
from specc.runtime.ranks.rank_options import RankOptions
from specc.runtime.ranks.rendezvous import Launched, Rendezvous
from specc.runtime.ranks.room import check_cores, check_memory, mmap_of_ranks, threads_of_rank
from specc.runtime.ranks.sockets import with_secret
from specc.runtime.ranks.stage_groups import StageGroups, place_of
from specc.runtime.ranks.stage_passes import StagePasses
from specc.runtime.ranks.watch import Watch

_MODULE = "specc.runtime.ranks"


def load_led(
    path: Path,
    manifest: Manifest,
    backend: str,
    limits: LoadLimits,
    options: RankOptions,
    verify: bool | None = None,
    num_threads: int | None = None,
    checks_weights: bool = True,
) -> LoadedPrograms:
    """Load an engine on all ranks; returns on rank 0 alone.

    Args:
        path: the engine directory.
        manifest: its manifest.
        backend: that runs it.
        limits: of what the engine may take, on each rank.
        options: of the ranks.
        verify: see `Engine.load`.
        num_threads: of each rank; None is the cores of this machine by the ranks on it.
        checks_weights: see `Engine.load`.
    Returns:
        models and steps whose passes and commits all ranks run.
    Raises:
        ConfigError: a backend that has no ranks, a launch of another number of processes, more
            ranks on this machine than cores, or another sharded engine in this process.
        EngineError: a rank cannot load the engine, has another one, or does not come; or there is
            not enough memory for all ranks of this machine.
        SystemExit: this was another rank than 0, and its work is done.
    """
    _check_backend(manifest, backend)
    _check_size(manifest, options)
    _check_alone(manifest)
    _check_collectives(manifest, backend)
    launched = Launched.from_environment()
    local_rank = launched.local_rank if launched is not None else 0
    if launched is not None:
        launched.check(options.num_ranks)
    local = launched.local_ranks if launched is not None else range(options.num_ranks)
    check_cores(len(local), options)
    if not facts_of(backend).is_on_gpu and (launched is None or launched.rank == local[0]):
        # one for all of this machine, before any of them has loaded its part
        sizes = (limits.max_num_seqs, limits.kv_cache_tokens)
        check_memory(manifest, local, *sizes, weights_budget=least_of(limits.offload_weights))
        if facts_of(backend).holds_weights:
            limits = replace(limits, mmap=mmap_of_ranks(path, manifest, local, limits))
    backend_of(backend).take_device(local_rank, len(local))
    if launched is not None and launched.rank > 0:
        _follow_launched(launched, options, path)
    num_threads = num_threads or threads_of_rank(len(local))
    torch.set_num_threads(num_threads)
    group: RankGroup = Copies(0, options.num_ranks)
    address = None
    # inputs of passes go from GPU to GPU, too
    is_on_gpu = facts_of(backend).is_on_gpu
    if manifest.parallel is not None or is_on_gpu:
        # collectives are among the operators
        load_operators()
        if launched is not None and launched.num_local < launched.size:
            address = launched.free_address()
            if not is_on_gpu:
                address = with_secret(address)
        place = place_of(manifest, 0)
        if place is not None and not is_on_gpu:
            group = StageGroups(place, local, options.collective_timeout_s)
        else:
            limit_s = options.collective_timeout_s
            group = make_group(options.num_ranks, limit_s, address, is_on_gpu, place)
    setup = {
        "path": str(path.resolve()),
        "backend": backend,
        "verify": verify,
        "max_num_seqs": limits.max_num_seqs,
        "kv_cache_tokens": limits.kv_cache_tokens,
        "offload_weights": limits.offload_weights,
        "num_local": len(local),
        "mmap": limits.mmap,
        "checks_weights": checks_weights,
        "num_threads": num_threads,
        "num_ranks": options.num_ranks,
        "timeout_s": options.timeout_s,
        "start_timeout_s": options.start_timeout_s,
        "silence_s": options.silence_s,
        "collective_timeout_s": options.collective_timeout_s,
    }
    job = Job(options, facts_about(path), setup, group)
    limits = replace(limits, num_local=len(local))
    watch = Watch(job, _start_all if launched is None else Rendezvous(launched, options).accept)
    watch.start()
    try:
        if isinstance(group, StageGroups):
            tickets = job.meet(group.offer(), address)
            meet = partial(group.meet, tickets, address)
            joined(lambda: meet(options.start_timeout_s), job.check)
        if isinstance(group, Gathering):
            job.group = group.meet(options.start_timeout_s, job.check)
        vocab_size = manifest.models[0].vocab_size
        own = manifest.of_rank(0)
        others = manifest.draft_homes
        own = own.part_of([m.name for m in manifest.models if m.name not in others])
        if facts_of(backend).is_captured:
            # the others have to be there when the first step is captured
            leader = Leader(job, watch, vocab_size)
            wait_ready = partial(job.wait_ready, starts=False)
            led = LedDevice(leader, manifest, wait_ready)
            loaded = backend_of(backend).load(path, own, replace(limits, ranks=led))
            job.start()
            return loaded
        # what drafts with other ranks is put together here
        limits = replace(limits, skips=led_plans(manifest))
        loaded = backend_of(backend).load(path, own, limits)
        job.wait_ready()
        passes = None
        if isinstance(group, StageGroups):
            passes = StagePasses(group, manifest.stages, vocab_size, loaded.operators)
        leader = Leader(job, watch, vocab_size, loaded.operators, passes)
        return _led(path, manifest, loaded, leader)
    except BaseException:
        end_job(job, watch)
        raise


def _led(path: Path, manifest: Manifest, loaded: LoadedPrograms, leader: Leader) -> LoadedPrograms:
    """The programs of rank 0, with orders before what all ranks do."""
    own = {**loaded.models, **loaded.self_drafts}
    led = {
        name: LedModel(leader, number, own[name])
        for number, name in enumerate(manifest.led_programs)
    }
    homes, vocab_size = manifest.draft_homes, manifest.models[0].vocab_size
    lone = {
        name: LoneDraft(leader, number, homes[name], vocab_size)
        for number, name in enumerate(manifest.ordered_programs)
        if name in homes
    }
    models: dict[str, Model] = {**own, **led, **lone}
    if loaded.cache.states is not None:
        loaded.cache.states.tell = leader.copy_states
    target = led[manifest.models[0].name]
    # whose rows others keep, too
    kept: dict[str, LedModel | LoneDraft] = {**led, **lone}

    def led_steps(
        make: type[LedStep], files: Mapping[str, str], found: Mapping[str, Step]
    ) -> dict[str, LedStep]:
        made = {}
        for number, entry in enumerate(manifest.plans):
            if entry.name not in files:
                continue
            operators, step = loaded.operators, cast("StagedStep | None", found.get(entry.name))
            if step is None:
                program = read_json(path / files[entry.name])
                step = led_drafts(program, number, models, operators, homes)
            drafts = {name: kept[name] for name in entry.plan.model_names if name in kept}
            history = loaded.cache.history
            made[entry.name] = make(step, target, operators, history, drafts)
        return made

    steps: dict[str, Step] = {**led_steps(LedStep, manifest.step_files, loaded.steps)}
    drawn = led_steps(DrawnStep, manifest.winners_files, loaded.winners_steps)
    return replace(
        loaded,
        models={model.name: models[model.name] for model in manifest.models},
        steps=steps,
        drawn=DrawnPrograms(target, drawn) if drawn else None,
        staged=target if target.num_stages > 1 else None,
        runner_type=StagedRunner if target.num_stages > 1 else SharedRunner,
        self_drafts={name: models[name] for name in loaded.self_drafts},
    )


def _start_all(job: Job) -> Iterator[Follower]:
    """Start the other ranks on this machine."""
    for rank in range(1, job.options.num_ranks):
        yield _start(rank, job.setup)


def _start(rank: int, setup: dict[str, Any]) -> Follower:
    pairs = [socket.socketpair() for _ in range(2)]
    own, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    numbers = [one.fileno() for one in theirs]
    try:
        process = subprocess.Popen(
            [interpreter(), "-P", "-m", _MODULE, *map(str, (rank, os.getpid(), *numbers))],
            stdin=subprocess.DEVNULL,
            # standard output is for what rank 0 generates
            stdout=sys.__stderr__.fileno() if sys.__stderr__ else subprocess.DEVNULL,
            pass_fds=numbers,
            env={**os.environ, "OMP_NUM_THREADS": str(setup["num_threads"])},
        )
    except OSError as error:
        for one in own:
            one.close()
        raise EngineError(
            f"rank {rank} cannot be started: {error}",
            "a Python, and memory and processes for another one",
            "look at the machine's memory and number of processes",
        ) from error
    finally:
        for one in theirs:
            one.close()
    return Follower(rank, Channel(own[0]), Channel(own[1]), process)


def _follow_launched(launched: Launched, options: RankOptions, path: Path) -> NoReturn:
    orders, signs = Rendezvous(launched, options).connect()
    raise SystemExit(follow(orders, signs, launched.rank, path=path))


def _check_size(manifest: Manifest, options: RankOptions) -> None:
    """A cut engine has as many ranks as it was cut for; copies of a whole one are for tests."""
    if manifest.parallel is not None and options.num_ranks != manifest.num_ranks:
        raise ConfigError(
            f"{options.num_ranks} ranks, and an engine that was cut for {manifest.num_ranks}",
            f"{manifest.num_ranks} ranks",
            "leave the number to the engine, or make another one with specc reshard",
        )


def _check_alone(manifest: Manifest) -> None:
    """Collectives of a program find the group of their process, of which there is one."""
    if manifest.parallel is not None and has_group():
        raise ConfigError(
            "a second sharded engine in this process",
            "one at a time",
            "close the first one (LLM.close, Engine.close), or load each in a process of its own",
        )


def _check_collectives(manifest: Manifest, backend: str) -> None:
    """A cut engine for GPUs has no library for the host."""
    is_on_host = not facts_of(backend).is_on_gpu
    if manifest.parallel is not None and facts_of(manifest.backend).is_on_gpu and is_on_host:
        raise ConfigError(
            f"the backend {backend}, and an engine that was cut for GPUs",
            f"the backend {manifest.backend}, whose collectives it was compiled for",
            f"leave out --backend, or compile with --backend {backend}",
        )


def _check_backend(manifest: Manifest, backend: str) -> None:
    able = [name for name in backend_names() if facts_of(name).takes_ranks]
    if backend not in able:
        raise ConfigError(
            f"several ranks of an engine of the backend {backend}",
            f"an engine of {' or '.join(able)}",
            "run it with one rank, or compile it for one of them"
            if manifest.parallel is None
            else "compile it for one of them"
            if facts_of(manifest.backend).is_on_gpu
            else "run its graphs with --backend eager, or compile it for one of them",
        )
