"""The models of an engine after all checks that need no module: types, lengths, tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specc.compiler.backends.base import CompilerBackend
from specc.compiler.checks import (
    Candidate,
    ModelLike,
    advice_for,
    check_lengths,
    check_logits,
    choose_dtypes,
    errors_of,
    open_models,
)
from specc.compiler.rank_checks import check_ranks
from specc.compiler.tokenizer import TokenizerFiles, check_tokenizers
from specc.config import CompileConfig
from specc.passes.frontend.model_source import ModelSource


@dataclass(frozen=True)
class CheckedModels:
    """Models that may be loaded.

    Args:
        candidates: the target first.
        dtypes: of each.
        tokens: the engine's tokenizer.
        warnings: what the user should know.
    """

    candidates: list[Candidate]
    dtypes: list[str]
    tokens: TokenizerFiles
    warnings: list[str]

    @classmethod
    def check(
        cls,
        target: ModelLike,
        drafts: Sequence[ModelLike],
        config: CompileConfig,
        backend: CompilerBackend,
        tokenizer: str | Path | None,
    ) -> CheckedModels:
        """Read configurations and headers, and refuse what cannot be compiled.

        Args:
            target: as the user has passed it.
            drafts: likewise.
            config: options.
            backend: of the engine.
            tokenizer: directory or tokenizer.json, where the target is a module.
        Raises:
            SpeccError: found / needed / do.
        """
        candidates = open_models(target, drafts)
        dtypes, told = choose_dtypes(config, candidates, backend.facts)
        backend.check_config(config, dtypes)
        check_lengths(config, candidates)
        check_logits(config, candidates[0], dtypes[0])
        check_ranks(config, candidates[0].config)
        tokens = check_tokenizers(candidates, tokenizer)
        return cls(candidates, dtypes, tokens, [*tokens.warnings, *told])

    def load(self) -> list[ModelSource]:
        """Open them; no weight is read.

        Raises:
            SpeccError: see `ModelSource.load`.
        """
        sources = []
        for candidate, dtype in zip(self.candidates, self.dtypes, strict=True):
            with errors_of(candidate.name), advice_for(candidate.model):
                kind = getattr(torch, dtype)
                sources.append(ModelSource.load(candidate.name, candidate.model, kind))
        return sources
