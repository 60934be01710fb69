"""Triton launches without a GPU: compiled for capability 9.0, or skipped."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any


class _Driver:
    """What compiles for a device that is not there; it launches nothing."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compile_only() -> Iterator[list[Any]]:
    """Compile what is launched, into Triton's cache, under the keys that a real launch has.

    Needs a process in which Triton does not interpret.

    Yields:
        the compiled kernels, in the order of their launches.
    """
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    kernels: list[Any] = []
    replace: Any = setattr
    run, before = JITFunction.run, driver._active

    def warm_up(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        kernels.append(run(kernel, *args, grid=grid, warmup=True, **options))

    driver.set_active(_Driver())  # type: ignore[arg-type]
    replace(JITFunction, "run", warm_up)
    try:
        yield kernels
    finally:
        replace(JITFunction, "run", run)
        replace(driver, "_active", before)


@contextlib.contextmanager
def launch_nothing() -> Iterator[None]:
    """Skip launches, compiled or interpreted: what they would write stays as it is."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    kind: Any = InterpretedFunction if is_interpreted else JITFunction
    run = kind.run
    kind.run = lambda kernel, *args, **options: None
    try:
        yield
    finally:
        kind.run = run
