"""What reading weights while they are used says when it fails, as an error for users."""

from __future__ import annotations

import re

from specc.errors import EngineError

# the sentences of kernels/cpu/weight_stream.cpp
_FAILED = re.compile(
    r".*(?: cannot be read at byte \d+: | ends at byte \d+, within the weights: "
    r"|: no byte of the weights was read for ).*"
)


def stream_error(error: BaseException) -> EngineError | None:
    """Why a file of weights could not be read, where that is what failed; None: something else."""
    match = _FAILED.search(str(error))
    if match is None:
        return None
    return EngineError(
        match.group(),
        "a file of weights that can be read, unchanged, while the engine runs",
        "see what the system says of the disk, or copy the engine again; the next pass reads anew",
    )
