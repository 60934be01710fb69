"""Whole weights, read from the files of stages that hold some of them each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from specc.artifact.forwarding_reader import ForwardingReader
from specc.artifact.safetensors_io import TensorReader
from specc.errors import WeightError
from specc.sharding.rank_reader import RankReader


class StagesReader(ForwardingReader):
    """The weights of a model of an engine as a `TensorReader`, of all of its stages.

    A weight that two stages read is in the files of both, and is taken from the first one. Weights
    of engines are not transposed.

    Args:
        stages: what reads the files of each; they belong to this one.
    """

    def __init__(self, stages: Sequence[RankReader]) -> None:
        self._stages = list(stages)
        self._by_key: dict[str, RankReader] = {}
        for stage in self._stages:
            self._by_key = dict.fromkeys(stage.keys(), stage) | self._by_key

    def close(self) -> None:
        for stage in self._stages:
            stage.close()

    def keys(self) -> Iterable[str]:
        return self._by_key.keys()

    def location(self, key: str | None = None) -> str:
        return (self._stages[0] if key is None else self._of(key)).location(key)

    def tensor(self, key: str) -> Tensor:
        """A whole tensor, in memory: for small ones.

        Raises:
            WeightError: there is none of this name.
        """
        return self._of(key).tensor(key)

    def source_of(self, key: str) -> tuple[TensorReader, str]:
        return self._of(key), key

    def _of(self, key: str) -> RankReader:
        if (found := self._by_key.get(key)) is None:
            raise WeightError(
                f"{self._stages[0].location()}: no stage has {key}",
                "every weight in the files of a stage",
                "compile or copy the engine again",
            )
        return found
