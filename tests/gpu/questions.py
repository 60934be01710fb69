"""What no documentation tells for certain, asked of torch on the GPU: answers for the record."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# here and not in the functions: the operator's schema is read from annotations
import torch

from tests.gpu.pair import pair_engine
from tests.gpu.results import Device, Results, Skipped


def check(results: Results, device: Device) -> None:
    """Every answer is for the record, a no among them; only a process that dies is a failure."""
    if device.kind != "cuda":
        raise Skipped("questions for a GPU")
    results.check("triton_operator_in_pt2", lambda: ask(triton_in_package))
    results.check("graph_memory_mib", lambda: ask(graph_memory))
    # last: a capture that fails may leave torch in any state
    results.check("aot_program_twice_in_one_capture", lambda: ask(aot_twice))


def ask(question: Callable[[], Any]) -> Any:
    """The answer, or `no` and why."""
    try:
        return question()
    except Exception as error:
        text = next(iter(str(error).splitlines()), "")
        return f"no: {type(error).__name__}: {text[:300]}"


def aot_twice() -> str:
    layer = torch.nn.Linear(64, 64).cuda().eval()
    x = torch.randn(4, 64, device="cuda")
    with torch.inference_mode(), tempfile.TemporaryDirectory() as scratch:
        package = torch._inductor.aoti_compile_and_package(
            torch.export.export(layer, (x,)), package_path=f"{scratch}/layer.pt2"
        )
        run = torch._inductor.aoti_load_package(package, run_single_threaded=True)
        run(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(run(x))
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        close = torch.allclose(out, layer(layer(x)), atol=1e-3)
    return "yes" if close else "no: another result"


def triton_in_package() -> str:
    import triton

    from tests.gpu.double_kernel import double_kernel

    @torch.library.triton_op("specc_check::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.library.wrap_triton(double_kernel)[(triton.cdiv(x.numel(), 128),)](
            x, out, x.numel(), BLOCK=128
        )
        return out

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return double(x) + 1

    x = torch.randn(300, device="cuda")
    with torch.inference_mode(), tempfile.TemporaryDirectory() as scratch:
        package = torch._inductor.aoti_compile_and_package(
            torch.export.export(Module(), (x,)), package_path=f"{scratch}/double.pt2"
        )
        found = torch._inductor.aoti_load_package(package)(x)
    return "yes" if torch.equal(found, 2 * x + 1) else "no: another result"


def graph_memory() -> dict[str, float]:
    """Device memory that capturing each plan for one and for eight sequences takes."""
    from specc.runtime.backends.capture_limits import CaptureLimits

    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        engine = pair_engine(Path(scratch) / "pair", "bfloat16", CaptureLimits.lazy())
        for plan, step in engine.steps.items():
            for bucket in (8, 1):
                torch.cuda.synchronize()
                before = torch.cuda.mem_get_info()[0]
                step.capture(bucket)
                torch.cuda.synchronize()
                found[f"{plan}-{bucket}"] = (before - torch.cuda.mem_get_info()[0]) / 2**20
    return found
