"""An engine that sleeps: its weights and caches leave memory, and come back as they were.

Programs keep the addresses that they know: pages behind them go back to the system, and weights are
read again from the files that they came from, which are kept open. Weights that were loaded since
then are in no such file; a temporary one holds them meanwhile. Rows of caches are gone: nobody may
find a prefix afterwards whose rows are zeros.
"""

from __future__ import annotations

import contextlib
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from specc.artifact.safetensors_io import read_exactly, tensor_bytes
from specc.errors import EngineError, OutputError, RequestError, WeightError
from specc.refuse_running import refuse_running
from specc.runtime.draft_weights import DraftWeights, LoadedEngine
from specc.system.allocator import give_back
from specc.system.dropped_pages import drop_to_zeros
from specc.system.files import check_free_space

if TYPE_CHECKING:
    from specc.runtime.backends.program_files import StoredWeights


class SleepingEngine(LoadedEngine, Protocol):
    """What is asked of an engine, besides; see `Engine`, which imports this module."""

    @property
    def stored_weights(self) -> Iterable[StoredWeights]: ...

    @property
    def draft_weights(self) -> DraftWeights: ...


# as vLLM counts them: 1 lets weights and caches go, and brings the weights back
LEVEL = 1
TAGS = ("weights", "kv_cache")


class Sleep:
    """Whether an engine sleeps.

    Args:
        engine: loaded. It is let sleep and woken between two iterations, by one thread.
    """

    def __init__(self, engine: SleepingEngine) -> None:
        # which holds this: a reference of its own would be a cycle, and keep the weights
        self._engine: SleepingEngine = weakref.proxy(engine)
        self.is_asleep = False
        # of drafts that were reloaded: their weights, one after the other
        self._kept: IO[bytes] | None = None
        self.num_sleeps = 0

    def begin(self, level: int = LEVEL) -> None:
        """Let weights and caches leave memory; where it sleeps already, nothing happens.

        Args:
            level: 1.
        Raises:
            ConfigError: an engine that cannot sleep.
            RequestError: another level; or a request runs or waits.
            OutputError: there is no room for weights that are in no file of the engine. It is
                awake then, with all that it had.
        """
        check_level(level)
        engine = self._engine
        refuse_running(engine.manifest, engine.facts, "sleep")
        if self.is_asleep:
            return
        if not all(loop.is_idle for loop in engine.loops):
            raise RequestError(
                "sleep while requests run", "an engine without any", "wait until they have ended"
            )
        self._kept = self._keep()
        self.is_asleep = True
        self.num_sleeps += 1
        cache = engine.cache
        cache.allocator.forget_all()
        slabs = [slab for slabs in cache.slabs.values() for slab in slabs]
        for states in (cache.states, *cache.draft_states.values()):
            if states is not None:
                states.checkpoints.forget_all()
                states.filled.clear()
                slabs += [*states.slabs, *states.replay]
        drop_to_zeros([*slabs, cache.history])
        for weights in engine.stored_weights:
            weights.drop()
        give_back()

    def end(self) -> None:
        """Have weights in memory again; where it is awake, nothing happens.

        Raises:
            EngineError: a file has been altered or cannot be read. It sleeps on then.
        """
        if not self.is_asleep:
            return
        for weights in self._engine.stored_weights:
            weights.restore()
        self._bring_back()
        self.is_asleep = False
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def check(self) -> None:
        """Raises RequestError: it sleeps, and runs no request."""
        if self.is_asleep:
            raise RequestError(
                "a request to an engine that sleeps", "one that is awake", "call wake_up() first"
            )

    def _changed(self) -> Iterator[Tensor]:
        """Weights that are not those of the engine's files."""
        drafts = self._engine.draft_weights
        for version in drafts.versions.values():
            if version.number:
                yield from drafts.tensors(drafts.form(version.name)).values()

    def _keep(self) -> IO[bytes] | None:
        """Write them where they wait; raises OutputError: there is no room."""
        if not (changed := list(self._changed())):
            return None
        with contextlib.ExitStack() as stack:
            try:
                file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  it outlives this
                stack.callback(file.close)
                check_free_space(
                    Path(tempfile.gettempdir()) / "weights", sum(x.nbytes for x in changed)
                )
                for tensor in changed:
                    data = tensor_bytes(tensor)
                    while data:
                        data = data[file.write(data) :]
            except OSError as error:
                raise OutputError(
                    f"{tempfile.gettempdir()}: {error.strerror or error}",
                    "room for the weights that were loaded since the engine was",
                    "free some, or set TMPDIR to another directory",
                ) from error
            stack.pop_all()
        return file

    @torch.inference_mode()
    def _bring_back(self) -> None:
        if self._kept is None:
            return
        place = 0
        for tensor in self._changed():
            values = torch.empty_like(tensor)
            try:
                read_exactly(self._kept, tensor_bytes(values), place, _lost)  # type: ignore[arg-type]
            except WeightError as error:
                raise EngineError(error.found, error.needed, error.do) from error
            tensor.copy_(values)
            place += tensor.nbytes


def check_level(level: int) -> None:
    """Raises RequestError: a level that specc has not got."""
    if level != LEVEL:
        raise RequestError(
            f"level={level!r:.40}",
            "1: weights and caches leave memory, and the same weights come back",
            "pass level=1; new weights of drafts are put in by /v1/drafts/reload",
        )


def check_tags(tags: Sequence[str] | None) -> None:
    """Raises RequestError: a part of what slept is to wake."""
    if tags and set(tags) != set(TAGS):
        raise RequestError(
            f"tags={', '.join(tags):.60}",
            f"{' and '.join(TAGS)}: they come back together",
            "leave tags out",
        )


def _lost(reason: str) -> WeightError:
    return WeightError(
        f"the file of weights that were put aside: {reason}",
        "what was written there",
        "start the engine again",
    )
