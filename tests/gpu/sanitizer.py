"""Whether compute-sanitizer works here: some machines refuse it, or let it see nothing."""

from __future__ import annotations

from tests.gpu.results import Device, Results, Skipped

SIZE = 128
# numbers that the fault writes: more than what may happen to lie after the tensor
FAR = 1 << 16


def skip(results: Results, device: Device) -> None:
    """Raises Skipped: there is no such tool."""
    raise Skipped("no compute-sanitizer on the path or in CUDA's folders")


def probe(results: Results, device: Device) -> None:
    """Run a kernel, then let it write beyond its tensor, which memcheck has to tell."""
    results.begin("a kernel")
    if device.kind == "cuda":
        _launch(SIZE)
        device.synchronize()
    results.end("a kernel", "passed")
    results.begin("a planted fault")
    if device.kind == "cuda":
        try:
            _launch(FAR)
            device.synchronize()
        except RuntimeError as error:
            # memcheck ends the kernel, and everything after it fails
            results.end("a planted fault", "passed", str(error)[:300])
            return
    results.end("a planted fault", "passed")


def _launch(size: int) -> None:
    """Double `size` numbers into a tensor of SIZE, which is an allocation of its own."""
    import torch

    from tests.gpu.double_kernel import double_kernel

    x = torch.ones(FAR, device="cuda")
    out = torch.zeros(SIZE, device="cuda")
    double_kernel[(max(1, size // SIZE),)](x, out, size, BLOCK=SIZE)
    if size <= SIZE:
        assert out.tolist() == [2.0] * SIZE
