"""What the children of `test_bounded_pool.py` run; found there by the path of this folder."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any


class Jobs:
    """One function that does what its data says."""

    def __init__(self, setup: Any) -> None:
        self._setup = setup
        if setup == "fails":
            raise ValueError("no such setup")
        if setup == "threads":
            threading.Thread(target=time.sleep, args=(60.0,), daemon=True).start()

    def __call__(self, data: list[Any]) -> Any:
        kind, *rest = data
        return getattr(self, kind)(*rest)

    def setup(self) -> Any:
        return self._setup

    def echo(self, value: Any) -> Any:
        return value

    def pid(self) -> int:
        return os.getpid()

    def modules(self) -> list[str]:
        return sorted(sys.modules)

    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()

    def spin(self) -> None:
        while True:
            # one call that keeps the interpreter for seconds
            pow(3, 10**8)

    def work(self, seconds: float) -> dict[str, float]:
        begin_s = time.process_time()
        while time.process_time() - begin_s < seconds:
            pass
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        return {"seconds": time.process_time() - begin_s, "niceness": niceness}

    def take(self, num_bytes: int) -> int:
        return len("x" * num_bytes)

    def kill(self, number: int) -> None:
        os.kill(os.getpid(), getattr(signal, number) if isinstance(number, str) else number)
        time.sleep(10)

    def crash(self) -> None:
        import ctypes

        ctypes.string_at(0)

    def print(self) -> str:
        print("text that is no answer", flush=True)
        print("nor is this", file=sys.stderr, flush=True)
        return "printed"

    def refuse(self) -> None:
        from specc.errors import RequestError

        raise RequestError("found it", "needed it", "do it")

    def fail(self) -> None:
        raise LookupError("not there")
