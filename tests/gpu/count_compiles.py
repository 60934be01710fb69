"""How much Triton compiles in a process of the check, as Triton tells it."""

from __future__ import annotations

from typing import Any

from tests.gpu.results import Device


def count_compiles(device: Device) -> Any:
    """Count what Triton compiles from now on; the function that is returned says how much it was.

    Where this Triton tells nobody, or nothing has imported it, that is None.
    """
    if device.kind != "cuda":
        return lambda: None
    try:
        from triton import knobs

        found = {"compiled": 0, "from_cache": 0, "seconds": 0.0}

        def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
            found["from_cache" if cache_hit else "compiled"] += 1
            found["seconds"] = round(found["seconds"] + times.total / 1e6, 2)

        knobs.compilation.listener = listen
    except (ImportError, AttributeError) as error:
        reason = repr(error)
        return lambda: reason
    return lambda: found
