"""Instructions as they come, for tests of what the library refuses."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specc.runtime.backends.cpu.native_calls import checked, functions, made
from tests.native_library import load_native


@contextmanager
def poisoned() -> Iterator[Any]:
    """The library, which fills memory that is free with what no value is."""
    load_native()
    functions().specc_set_poison(1)
    yield functions()
    functions().specc_set_poison(0)


class Code:
    """Instructions as they come."""

    def __init__(self, num_slots: int) -> None:
        self.library = functions()
        self.pointer = made(self.library.specc_code_new(num_slots))

    def __getattr__(self, name: str):
        function = getattr(self.library, f"specc_code_{name}")
        return lambda *arguments: checked(function(self.pointer, *arguments))

    def __del__(self) -> None:
        self.library.specc_code_free(self.pointer)


def begun(num_slots: int = 8) -> Code:
    code = Code(num_slots)
    code.input(0)
    code.stage()
    return code
