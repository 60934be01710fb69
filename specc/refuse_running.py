"""What an engine of some kind cannot do while it runs: the rows of `refusals.py` about that."""

from __future__ import annotations

from specc.artifact.backends import BackendFacts
from specc.artifact.manifest import Manifest
from specc.compile_request import CompileRequest
from specc.config import CompileConfig
from specc.refusals import refuse


def refuse_running(manifest: Manifest | None, facts: BackendFacts, what: str) -> None:
    """Refuse what does not go with how an engine was compiled.

    Args:
        manifest: of the engine; None of one that was made by hand.
        facts: of the backend that runs it.
        what: see `CompileRequest.while_running`.
    Raises:
        ConfigError: it does not.
    """
    config = CompileConfig()
    if manifest is not None:
        config = CompileConfig(
            tensor_parallel_size=manifest.tensor_parallel_size,
            pipeline_parallel_size=max(1, len(manifest.stages)),
            draft_ranks=manifest.parallel.draft_ranks if manifest.parallel else 1,
            segments=manifest.segments is not None,
        )
    refuse(CompileRequest(config, (), facts, facts.options, while_running=(what,)))
