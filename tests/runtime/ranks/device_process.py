"""A rank of a captured engine whose device is simulated: `device_process.py ENGINE JOBS`.

Its launcher sets RANK, WORLD_SIZE and the rest. Gloo stands for NCCL: the collectives, their order
and what surrounds them are the same. Rank 0 does the jobs, and says as JSON what comes of each.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from datetime import timedelta
from typing import Any

import torch

from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.backends.captured import backend as captured_backend
from specc.runtime.backends.captured.captures import CaptureWarning
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.ranks import followed_device, nccl
from specc.runtime.ranks.answers import checksum
from specc.runtime.ranks.rank_options import RankOptions
from specc.sampling.params import SamplingParams
from specc.sampling.structured import StructuredOutputsParams
from tests.runtime.backends.captured.simulated_device import SimulatedDevice

TIMEOUT_S = 20.0


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def simulate() -> SimulatedDevice:
    """Let a simulated device stand for this rank's GPU, and gloo for NCCL."""
    torch.set_num_threads(1)
    device = SimulatedDevice()

    def replace(module: Any, name: str, value: Any) -> None:
        assert hasattr(module, name), name
        setattr(module, name, value)

    def over_gloo(store: Any, rank: int, size: int, limit: timedelta, place: torch.device) -> Any:
        import torch.distributed as dist

        assert place == device.device
        return dist.ProcessGroupGloo(store, rank, size, limit)

    replace(torch.cuda, "is_available", lambda: True)
    replace(captured_backend, "cuda_device", lambda: device)
    replace(nccl, "make_processes", over_gloo)
    replace(nccl, "group_device", lambda: device.device)
    return device


def load(path: str, options: dict[str, Any], num_ranks: int) -> Engine:
    sizes = options.get("capture", [2])
    limits = CaptureLimits(sizes=tuple(sizes), max_seconds=options.get("max_seconds", 30.0))
    ranks = RankOptions(num_ranks, TIMEOUT_S, ends_process=False, oversubscribes=True)
    given = {"kv_cache_tokens": options.get("kv_cache_tokens")}
    return Engine.load(path, capture=limits, ranks=ranks if num_ranks > 1 else None, **given)


def params_of(given: dict[str, Any]) -> SamplingParams:
    structured = given.pop("structured_outputs", None)
    if structured is not None:
        given["structured_outputs"] = StructuredOutputsParams(**structured)
    return SamplingParams(**{"temperature": 0, **given})


def do(
    engine: Engine, device: SimulatedDevice, job: dict[str, Any], layers: list[list[int]]
) -> dict[str, Any]:
    """Generate, and count what was captured, replayed and ordered meanwhile.

    Sums are those of all ranks, or, of a rank alone, those of some of its layers each.
    """
    captured = len(device.tapes)
    params = [params_of(given) for given in job["params"]]
    with warnings.catch_warnings(record=True, action="always", category=CaptureWarning) as told:
        llm = LLM(engine, plan=job["plan"], micro_batches=job.get("micro_batches"))
        outputs = llm.generate(job["prompts"], params)
    target: Any = engine.target
    slabs = [slab for name in engine.manifest.led_models for slab in engine.cache.slabs[name]]
    # a rank alone leads nobody
    leader = getattr(target._program, "leader", None)
    if leader is not None:
        sums = leader.checksums(slabs)
    else:
        sums = [checksum([slab[own] for slab in slabs]) for own in layers]
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "accepted": llm.get_metrics().num_accepted_tokens,
        "captured": [captured, len(device.tapes)],
        "preempted": llm.get_metrics().num_preemptions,
        "warnings": len(told),
        "sums": [value.hex()[:16] for value in sums],
    }


def main() -> None:
    options = json.loads(sys.argv[2])
    device = simulate()
    if (fault := options.get("fault")) is not None and os.environ["RANK"] == "1":
        break_follower(fault)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if (path := options.get("rows")) is not None and os.environ["RANK"] == "1":
        keep_lone_rows(path)
    engine = load(sys.argv[1], options, num_ranks)
    for number, job in enumerate(options["jobs"]):
        begin_s = time.monotonic()
        try:
            say(**do(engine, device, job, options.get("layers", [])))
            if path is not None and num_ranks == 1:
                torch.save(engine.cache.slabs, f"{path}-{number}")
        except Exception as error:
            seconds = time.monotonic() - begin_s
            say(error=f"{type(error).__name__}: {error}", seconds=seconds)
            break
    say(done=True)


def keep_lone_rows(path: str) -> None:
    """Write the caches of drafts that this rank alone has whenever rank 0 asks for sums.

    Args:
        path: of the files, without the number of the job.
    """
    checksum = followed_device.FollowedDevice.checksum
    count = 0

    def keep(self: Any) -> bytes:
        nonlocal count
        torch.save({name: self._slabs[name] for name in self._lone}, f"{path}-{count}")
        count += 1
        return checksum(self)

    followed_device.FollowedDevice.checksum = keep  # type: ignore[method-assign]


def break_follower(fault: str) -> None:
    """Rank 1 dies at its third replay, or says that it cannot do it."""
    follow = followed_device.FollowedDevice.follow
    count = 0

    def broken(self: Any, order: Any) -> Any:
        nonlocal count
        count += order.kind.name == "REPLAY"
        if count == 3 and fault == "dies":
            os._exit(7)
        if count == 3 and fault == "fails":
            raise RuntimeError("an illegal memory access")
        return follow(self, order)

    followed_device.FollowedDevice.follow = broken  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
