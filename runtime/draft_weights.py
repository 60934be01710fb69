"""New weights for a draft while its engine runs: read and checked anywhere, put in between steps.

Programs, and steps that were captured as graphs, know weights by their addresses: values are copied
to where the old ones are. A step drafts, verifies and accepts with one set of weights, since it is
its own probabilities that a drafted token is accepted by; so weights change when no step is in
flight, and whatever a draft proposes after that, outputs are those of the target.

Rows that the draft has in the cache stay: computing them anew would hold up every request for its
prompt, and a row of older weights costs acceptance, not correctness. Others do not find them any
more, though: a prompt that many begin with would keep rows of the first weights for ever. Rows of
the target stay shared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from specc.artifact.draft_file import DraftForm, NewWeights, draft_entry, read_new_weights
from specc.artifact.lent_keys import LENT
from specc.errors import ConfigError, EngineError
from specc.refuse_running import refuse_running

if TYPE_CHECKING:
    from specc.artifact.backends import BackendFacts
    from specc.artifact.manifest import Manifest
    from specc.runtime.backends.step import Model
    from specc.runtime.in_flight import InFlight
    from specc.runtime.scheduling.kv_cache import KVCache


class Asleep(Protocol):
    """What tells whether an engine sleeps."""

    is_asleep: bool


class LoadedEngine(Protocol):
    """What new weights, and sleep, are asked of; see `Engine`, which imports this module."""

    manifest: Manifest | None
    directory: Path | None
    cache: KVCache
    drafts: list[Model]

    @property
    def facts(self) -> BackendFacts: ...

    @property
    def loops(self) -> Iterable[InFlight]: ...

    @property
    def sleep(self) -> Asleep: ...


@dataclass(frozen=True)
class DraftVersion:
    """Which weights a draft has.

    Args:
        name: `draft_0`, ….
        number: 0 are those of the engine; each reload has the next one.
        digest: sha256 of what was loaded, hexadecimal; empty for those of the engine.
    """

    name: str
    number: int = 0
    digest: str = ""


class DraftWeights:
    """The drafts of an engine that may get other weights.

    Args:
        engine: loaded.
    """

    def __init__(self, engine: LoadedEngine) -> None:
        # which holds this: a reference of its own would be a cycle, and keep the weights
        self._engine: LoadedEngine = weakref.proxy(engine)
        entries = engine.manifest.models[1:] if engine.manifest else ()
        self.versions = {entry.name: DraftVersion(entry.name) for entry in entries}
        self.num_failures = 0
        self._forms: dict[str, DraftForm] = {}

    @property
    def num_reloads(self) -> int:
        return sum(version.number for version in self.versions.values())

    def read(
        self, path: str | Path, draft: str | None = None, folder: Path | None = None
    ) -> NewWeights:
        """Read a file and look at all of it; nothing changes. In any thread.

        Args:
            path: of a file that `specc draft-weights` has written for this engine.
            draft: `draft_0`, …; None is the only one.
            folder: see `read_new_weights`.
        Raises:
            ConfigError: the engine has no such draft, or none that takes weights.
            WeightError: see `read_new_weights`.
            EngineError: its directory holds another engine by now.
        """
        try:
            form = self.form(draft)
            return read_new_weights(Path(path), form, self.tensors(form), folder)
        except Exception:
            self.num_failures += 1
            raise

    def form(self, draft: str | None = None) -> DraftForm:
        """What a file for a draft has to hold; arguments and errors as of `read`."""
        engine = self._engine
        if engine.manifest is None or engine.directory is None:
            raise ConfigError(
                "an engine that was made by hand", "one of a directory", "load it from there"
            )
        refuse_running(engine.manifest, engine.facts, "reload_draft")
        entry = draft_entry(engine.manifest, draft)
        if entry.name not in self._forms:
            held = {key: (x.dtype, tuple(x.shape)) for key, x in self._held(entry.name).items()}
            given = engine.directory, engine.manifest, entry.name, held
            self._forms[entry.name] = DraftForm.of(*given)
        return self._forms[entry.name]

    def tensors(self, form: DraftForm) -> dict[str, Tensor]:
        """Those that a file has, as they are now: programs read them there."""
        held = self._held(form.name)
        return {key: held[key] for key in form.tensors}

    def put(self, new: NewWeights) -> DraftVersion:
        """Copy weights to where programs read them; all of them, or none.

        Call it between two steps, while none is in flight and no other thread runs one.

        Args:
            new: of `read`, which has the old weights afterwards.
        Raises:
            EngineError: the engine sleeps.
        """
        engine, name = self._engine, new.form.name
        if any(loop.queued for loop in engine.loops):
            raise RuntimeError("weights of a draft change while a step is in flight")
        if engine.sleep.is_asleep:
            raise EngineError("an engine that sleeps", "one that is awake", "wake it up first")
        exchange(self.tensors(new.form), new.tensors)
        number = list(self.versions).index(name)
        engine.cache.allocator.forget_draft(number)
        if (states := engine.cache.draft_states.get(number)) is not None:
            states.filled.clear()
        self.versions[name] = DraftVersion(name, self.versions[name].number + 1, new.digest)
        return self.versions[name]

    def _held(self, name: str) -> Mapping[str, Tensor]:
        """All tensors that a draft's program may read, its target's under other names."""
        number = list(self.versions).index(name)
        found: Mapping[str, Tensor] = self._engine.drafts[number].weights  # type: ignore[attr-defined]
        return {key: x for key, x in found.items() if not is_lent(key)}


def is_lent(key: str) -> bool:
    """Whether a tensor that a draft's program reads is in its target's file."""
    return key.startswith(LENT)


@torch.inference_mode()
def exchange(
    own: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    copy: Callable[[Tensor, Tensor], object] = Tensor.copy_,
) -> None:
    """Swap the values of tensors; where that fails in the middle, all of them are as before.

    Args:
        own: where programs read them, on any device.
        new: of the same keys, shapes and types, on the CPU.
        copy: into its first argument.
    """
    done: list[str] = []
    try:
        for key, tensor in own.items():
            # on the CPU this is a copy, too
            old = tensor.to("cpu", copy=True)
            done.append(key)
            copy(tensor, new[key])
            new[key].copy_(old)
    except BaseException:
        *whole, last = done or [""]
        if last:
            own[last].copy_(old)
        for key in whole:
            own[key].copy_(new[key])
        raise
    finally:
        for device in {x.device for x in own.values() if x.is_cuda}:
            # graphs are replayed on streams of their own
            torch.cuda.synchronize(device)
