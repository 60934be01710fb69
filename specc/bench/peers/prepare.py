"""From `--against NAME` to contenders: checkpoints, conversions, processes, settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specc.bench.peers.convert import converted
from specc.bench.peers.names import ASSISTED, MODES, PEERS, run_of
from specc.bench.peers.peer import Form, Job, NotAvailableError
from specc.bench.peers.resident import ResidentContender
from specc.errors import ModelNotFoundError
from specc.progress import PhaseTimer

# draft tokens of lookups where the engine's plan has none to compare with
_DEPTH = 4


@dataclass(frozen=True)
class Pair:
    """What peers run: the checkpoints that an engine was compiled from.

    Args:
        target: directory, file or cached hub id.
        draft: the same; None where peers have no draft to run.
        no_draft: why there is none, for reports.
        integers: `int8` or `int4` of target and of draft, where the engine rounded them.
        depth: draft tokens of the engine's plan; 0 where none drafts.
        special: what differs in the other programs, as notes.
    """

    target: str
    draft: str | None
    no_draft: str
    dtype: str
    depth: int
    special: Sequence[str] = ()
    integers: tuple[str | None, str | None] = (None, None)


@dataclass
class Prepared:
    """Contenders of all peers, each loaded and run at least once.

    Args:
        not_available: `{"name": run, "reason": …}` of what peers cannot do.
        notes: settings that were chosen.
    """

    contenders: list[ResidentContender] = field(default_factory=list)
    not_available: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def settings(self) -> dict[str, dict[str, Any]]:
        """Run → the setting that was kept, its name, and the bytes of its models, for JSON."""
        return {
            one.name: {
                "name": one.setting,
                "model_bytes": one.model_bytes,
                **one.settings[one.setting],
            }
            for one in self.contenders
        }

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for contender in self.contenders:
            contender.close(at_once=kind is not None)


def prepare_peers(
    names: Sequence[str],
    pair: Pair,
    batches: Sequence[Sequence[list[int]]],
    max_tokens: int,
    threads: int,
    phases: PhaseTimer,
) -> Prepared:
    """Convert, load and try all modes of the peers.

    Args:
        names: of `PEERS`.
        batches: token ids of prompts, by batch.
        max_tokens: output tokens of each prompt.
        threads: of each process.
        phases: told of each peer.
    Raises:
        ModelNotFoundError: a checkpoint is absent.
    """
    target = find_checkpoint(pair.target, "--target-checkpoint")
    draft = None
    if pair.draft is not None:
        draft = find_checkpoint(pair.draft, "--draft-checkpoint")
    prepared = Prepared()
    prepared.notes += pair.special
    try:
        for name in names:
            with phases.phase(f"prepare {name}"):
                for mode in MODES:
                    paths = (target, draft if mode == ASSISTED else None)
                    run = run_of(name, mode)
                    try:
                        if mode == ASSISTED and draft is None:
                            raise NotAvailableError(pair.no_draft)
                        job = _job(name, mode, paths, pair, batches, max_tokens, threads)
                        contender = ResidentContender(run, PEERS[name].module, job)
                        prepared.contenders.append(contender)
                        prepared.notes += _choose_setting(contender)
                    except NotAvailableError as error:
                        _leave_out(prepared, run)
                        prepared.not_available.append({"name": run, "reason": str(error)})
    except BaseException as error:
        prepared.__exit__(type(error))
        raise
    return prepared


def _job(
    name: str,
    mode: str,
    paths: tuple[Path, Path | None],
    pair: Pair,
    batches: Sequence[Sequence[list[int]]],
    max_tokens: int,
    threads: int,
) -> Job:
    target, draft = (
        None if path is None else _readable(name, path, Form(pair.dtype, integers), threads)
        for path, integers in zip(paths, pair.integers, strict=True)
    )
    assert target is not None
    lists = [[list(ids) for ids in batch] for batch in batches]
    return Job(mode, target, draft, pair.dtype, threads, lists, max_tokens, pair.depth or _DEPTH)


def _readable(name: str, checkpoint: Path, form: Form, threads: int) -> str:
    """A checkpoint as the peer reads it, converted where it has to be."""
    facts = PEERS[name]
    if facts.model is None or checkpoint.suffix == facts.reads:
        return str(checkpoint.absolute())
    return str(converted(name, checkpoint, form, threads) / facts.model)


def _choose_setting(contender: ResidentContender) -> list[str]:
    """Keep the fastest setting, and return a note on it; of one alone, only warm up.

    Raises:
        NotAvailableError: a run failed.
    """
    names = list(contender.settings)
    # in turns, the faster of two runs each: the first one warms up
    num_turns = 2 if len(names) > 1 else 1
    turns = [{name: contender.run_with(name).elapsed_s for name in names} for _ in range(num_turns)]
    if len(names) == 1:
        return []
    seconds = {name: min(turn[name] for turn in turns) for name in names}
    contender.setting = min(seconds, key=lambda name: seconds[name])
    times = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
    return [
        f"{contender.name} runs with its fastest setting, {contender.setting}"
        f" (before the rounds: {times})"
    ]


def _leave_out(prepared: Prepared, run: str) -> None:
    """End the process of a contender that was loaded and then failed."""
    for contender in [one for one in prepared.contenders if one.name == run]:
        contender.close(at_once=True)
        prepared.contenders.remove(contender)


def find_checkpoint(source: str, option: str) -> Path:
    """Directory or file of a checkpoint.

    Args:
        source: path or hub id.
    Raises:
        ModelNotFoundError: it is neither here nor in the hub's cache.
    """
    path = Path(source)
    if path.exists():
        return path
    if (cached := _cached(source)) is not None:
        return cached
    raise ModelNotFoundError(
        f"no checkpoint at {source}, where the engine was compiled from",
        "the original checkpoint, for others to run",
        f"pass {option} DIR, the place that it is at now",
    )


def _cached(source: str) -> Path | None:
    """Where a hub id is on this machine."""
    from transformers.utils import cached_file

    try:
        found = cached_file(source, "config.json", local_files_only=True)
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found).parent
