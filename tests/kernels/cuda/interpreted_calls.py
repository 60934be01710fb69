"""Make calls between interpreted functions cheap.

Triton's interpreter puts its own functions into `triton.language` before a kernel runs, and again,
4 ms each, at every call of a function inside of it, where nothing is left to replace. Here a
module's functions do that once: kernels of many small functions run several times as fast.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction


def patch_calls() -> None:
    """Patch the interpreter of this process; a second call changes nothing."""
    if hasattr(InterpretedFunction, "specc_modules"):
        return
    InterpretedFunction.specc_modules = set()

    def call(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        # modules that see `triton.language` find it replaced by the kernel that runs; what sees
        # its core stays replaced
        name = self.fn.__module__
        if name not in InterpretedFunction.specc_modules:
            interpreter._patch_lang(self.fn)
            InterpretedFunction.specc_modules.add(name)
        return self.rewrite()(*args, **kwargs)

    InterpretedFunction.__call__ = call
