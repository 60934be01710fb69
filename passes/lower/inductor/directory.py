"""A directory for torch's Inductor, instead of the one that anybody may have made before."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from specc.errors import CompilerError
from specc.system.owned_directory import temporary_directory

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@contextlib.contextmanager
def inductor_directory() -> Iterator[None]:
    """Let what torch does inside of the block use an empty directory of its own.

    To open and to trace a model torch imports parts of Inductor, which look for settings in a
    directory of the temporary one whose name everybody knows, and make it where it is absent. A
    directory that the user has named is left alone.

    Raises:
        CompilerError: the temporary directory cannot be written.
    """
    if os.environ.get(_VARIABLE):
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            directory = stack.enter_context(temporary_directory())
        except OSError as error:
            raise CompilerError(
                f"writing the temporary directory failed: {error}",
                "a directory with some room that this user may write to",
                "free some space, or set TMPDIR to another directory",
            ) from error
        os.environ[_VARIABLE] = str(directory)
        # torch sets it, too
        stack.callback(os.environ.pop, _VARIABLE, None)
        yield
