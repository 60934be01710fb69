"""transformers: `generate`, with an `assistant_model` or `prompt_lookup_num_tokens`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specc.bench.baseline import ONE_SEQUENCE, TransformersContender, constant_draft, quieten
from specc.bench.peers.names import ASSISTED, LOOKUP, PLAIN, TRANSFORMERS, run_of
from specc.bench.peers.peer import Job, NotAvailableError
from specc.bench.rounds import Measurement

# what transformers does unless told otherwise: up to 20 draft tokens, cut where the draft is unsure
DEFAULTS = "defaults"


class TransformersGenerate:
    """See `Peer`; it reads checkpoints as they are."""

    def load(self, job: Job) -> _Generate:
        if job.mode != PLAIN and any(len(batch) > 1 for batch in job.batches):
            raise NotAvailableError(ONE_SEQUENCE)
        return _Generate(job)


PEER = TransformersGenerate()


class _Generate:
    """One model, or a pair, and the configurations that it is run with."""

    def __init__(self, job: Job) -> None:
        import torch

        torch.set_num_threads(job.threads)
        quieten()
        target = _load(job.target, job.dtype)
        draft = None if job.draft is None else _load(job.draft, job.dtype)
        self.settings: Mapping[str, Mapping[str, Any]] = _settings(job)
        name = run_of(TRANSFORMERS, job.mode)
        self._contenders = {
            setting: TransformersContender(
                name,
                target,
                job.batches,
                job.max_tokens,
                draft,
                dict(own) if job.mode == ASSISTED else {},
                dict(own) if job.mode == LOOKUP else {},
            )
            for setting, own in self.settings.items()
        }

    def run(self, setting: str) -> Measurement:
        try:
            return self._contenders[setting].run()
        except ValueError as error:
            # some pairs it refuses, for example by vocabulary size
            raise NotAvailableError(f"transformers refuses it ({_first_line(error)})") from error


def _settings(job: Job) -> dict[str, dict[str, Any]]:
    if job.mode == ASSISTED:
        return {f"constant {job.depth}": constant_draft(job.depth), DEFAULTS: {}}
    if job.mode == LOOKUP:
        # 10 is what its documentation takes
        return {f"{n} tokens": {"prompt_lookup_num_tokens": n} for n in (job.depth, 10)}
    return {"default": {}}


def _load(source: str, dtype: str) -> Any:
    import torch
    import transformers

    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, dtype), local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise NotAvailableError(f"it cannot load {source} ({_first_line(error)})") from error
    return model.eval()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
