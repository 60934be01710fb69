"""What stands for a GPU while the check is rehearsed: a device on the CPU, and models it can run.

Steps are captured and replayed by `tests.runtime.backends.captured.simulated_device`; Triton's
interpreter or the oracles compute. Or they are run again and again on a device whose tensors are
told apart from the host's (`tests.gpu.told_apart`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tests.gpu.results import APART

VOCAB = 211


def prepare(kind: str) -> None:
    """Let the check's parts find the device, and be small; for this process."""
    import torch

    if kind == APART:
        # before anything of specc is imported
        from tests.gpu import told_apart

        told_apart.prepare()
    from specc.bench import device as bench_device
    from specc.runtime.backends.captured import backend as captured_backend
    from specc.runtime.backends.cuda import choose_launches, kept_measurements
    from tests.gpu import (
        benchmark,
        collectives,
        cut_trees,
        grammar,
        kinds,
        quantized_sweep,
        replay,
        sampling,
        shapes,
        sweep_tiles,
    )
    from tests.models import tiny_config
    from tests.runtime.backends.captured.simulated_device import SimulatedDevice

    torch.set_num_threads(1)
    device = told_apart.graphs() if kind == APART else SimulatedDevice()

    def replace(module: Any, name: str, value: Any) -> None:
        # what has moved would be replaced where nobody looks
        assert hasattr(module, name), name
        setattr(module, name, value)

    replace(bench_device, "open_device", lambda: (device, "cuda"))
    replace(captured_backend, "cuda_device", lambda: device)
    conditions = kept_measurements.Conditions("simulated", torch.__version__, "", "")
    replace(kept_measurements.Conditions, "of", lambda device: conditions)
    # engines for CUDA are not loaded where there is none
    replace(torch.cuda, "is_available", lambda: True)
    # as on a GPU that has them; kernels are not compiled here
    replace(choose_launches, "can_launch_dependent", lambda device: kind != APART)
    for name in ("_ROUNDS", "_REPLAYS", "_CHECKS"):
        replace(choose_launches, name, 1)
    bench_device.COPY_BYTES["cpu"] = 1 << 20
    root = Path(tempfile.mkdtemp(prefix="specc-shapes-"))
    for name, layers in (("t", 2), ("d", 1)):
        config = tiny_config("llama", num_hidden_layers=layers, architectures=["LlamaForCausalLM"])
        config.save_pretrained(root / name)
    for module in (benchmark, replay):
        replace(module, "SHAPES", f"{root}/t,{root}/d")
        replace(module, "CONTEXT", 20)
        replace(module, "TOKENS", 13)
    replace(replay, "BATCHES", (1, 3))
    replace(replay, "REPLAYS", 3)
    replace(replay, "QUEUED", 2)
    replace(replay, "ROUNDS", 1)
    replace(grammar, "NUM_TOKENS", 9)
    replace(cut_trees, "NUM_TOKENS", 12)
    replace(kinds, "NUM_TOKENS", 3)
    replace(kinds, "PROMPT_LENGTHS", (3, 40))
    replace(kinds, "REPLAYED", 1)
    replace(collectives, "CALLS", 2)
    replace(collectives, "ROUNDS", 1)
    replace(benchmark, "ATTENTION_ROUNDS", 1)
    load = benchmark.load_script

    def tiny(name: str) -> Any:
        module = load(name)
        module.CASES = module.TINY[1:]
        return module

    replace(benchmark, "load_script", tiny)
    for module in (quantized_sweep, sweep_tiles):
        for name in ("LAYERS", "LEAST_BYTES", "LEAST_CALLS", "MOST"):
            replace(module, name, 1)
    replace(quantized_sweep, "REPLAYS", 1)
    for case in shapes.CASES.values():
        draft = f",{root}/d" if "/" in case["shapes"] else ""
        case |= {"shapes": f"{root}/t{draft}", "tokens": 9}
        case["options"] |= {"context": 20}
    replace(sampling, "VOCAB", VOCAB)
    replace(sampling, "BATCHES", (2,))
    replace(sampling, "ROUNDS", 1)
    replace(sampling, "CALLS", 1)
