"""Errors that users see: what was found, what was needed, what to do.

Every bad input ends in one of these classes. The command line prints the three lines and exits
with code 2, or with 1 where the engine is lost (`RankError`). `assert` and built-in exceptions are
for specc's own bugs only.
"""

from __future__ import annotations

from typing import Any


class SpeccError(Exception):
    """Base class of every error that a user can cause or repair.

    Args:
        found: what specc saw, with the values.
        needed: what would have been valid.
        do: the next action for the user.
    """

    def __init__(self, found: str, needed: str, do: str) -> None:
        self.found = found
        self.needed = needed
        self.do = do
        super().__init__(f"found:  {found}\nneeded: {needed}\ndo:     {do}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.found, self.needed, self.do)


class ModelNotFoundError(SpeccError):
    """The path of a model is absent or holds no checkpoint."""


class NotCausalLMError(SpeccError):
    """The model does not map token ids to next-token logits."""


class UnsupportedAttentionError(SpeccError):
    """An attention layer does something that `specc::tree_attention` does not express."""


class UnsupportedRotaryError(SpeccError):
    """Rotary frequencies depend on the tokens of a pass, so a tree pass would change numbers."""


class UnsupportedGraphError(SpeccError):
    """The traced graph holds something that no pass and no runtime operator covers."""


class WeightError(SpeccError):
    """A checkpoint misses a tensor, or holds it in another shape or dtype."""


class HeadError(SpeccError):
    """A draft that reads hidden states is malformed, another target's, or of an unknown kind."""


class VocabMismatchError(SpeccError):
    """A tokenizer that cannot be read, or a draft that has too few of the target's tokens."""


class TreeError(SpeccError):
    """A token tree is malformed or too deep for the model."""


class ConfigError(SpeccError):
    """An option has a value outside its range."""


class CompilerError(SpeccError):
    """The C++ compiler is absent, too old, or fails."""


class OutputError(SpeccError):
    """The engine directory cannot be written."""


class EngineError(SpeccError):
    """An engine directory is incomplete, altered, or made for another runtime."""


class RequestError(SpeccError):
    """A request cannot be served: empty, too long, or with invalid parameters."""


class ContextLengthError(RequestError):
    """A prompt leaves no room for an output.

    Args:
        found: as of every error.
        needed: the same.
        do: the same.
        max_length: tokens of prompt and output together.
    """

    def __init__(self, found: str, needed: str, do: str, max_length: int) -> None:
        super().__init__(found, needed, do)
        self.max_length = max_length

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.found, self.needed, self.do, self.max_length)


class OverloadError(SpeccError):
    """A server has as many requests as it takes, or is about to stop."""


class FaultError(SpeccError):
    """The engine failed while it worked on a request, which was not to blame."""


class RankError(FaultError):
    """A process that runs a part of the engine is lost, and with it the engine."""


class InputFileError(SpeccError):
    """A file of prompts cannot be read."""


class TensorRTError(SpeccError):
    """TensorRT is absent, too old, or cannot build this program as it has to be built."""
