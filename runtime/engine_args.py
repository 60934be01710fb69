"""How an engine is opened and run: said once for Python, the servers and the command line.

Nothing here imports torch before an engine is loaded.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from specc.errors import ConfigError
from specc.option import check_ranges, object_of, option
from specc.runtime.engine_checks import check_cut, check_dtype, check_length, engine_directory
from specc.system.machine import check_threads
from specc.vllm.answers import answers_names
from specc.vllm.engine_options import ENGINE

if TYPE_CHECKING:
    from specc.runtime.backends.capture_limits import CaptureLimits
    from specc.runtime.core import EngineCore
    from specc.runtime.engine import Engine
    from specc.runtime.policies.base import Policy
    from specc.sampling.structured import StructuredOutputsConfig

_AUTO = "auto"
# of `Engine.load`: they say nothing to an engine that is loaded
_OF_LOADING = {
    "verify", "num_threads", "max_num_seqs", "backend", "capture", "kv_cache_tokens",
    "rank_timeout_s", "oversubscribes", "offload_weights", "overlaps", "mmap", "check_weights",
}  # fmt: skip


def parse_budget(given: str | int | None) -> str | int | None:
    """`auto`, or a number of bytes.

    Raises:
        ConfigError: it is neither.
    """
    if given is None or given == _AUTO or (type(given) is int and given > 0):
        return given
    from specc.system.files import parse_bytes

    try:
        num_bytes = parse_bytes(str(given))
    except ValueError:
        num_bytes = 0
    if num_bytes == 0:
        raise ConfigError(
            f"--offload-weights {given}",
            "a number of bytes above 0, such as 700M or 4GB, or auto",
            "correct it",
        )
    return num_bytes


@answers_names(ENGINE, ConfigError)
@dataclass(frozen=True)
class EngineArgs:
    """What `LLM` takes, by the names that it has there; `LLM` says more of each.

    Names of vLLM's options are taken, too: `model` and `enable_prefix_caching` mean `engine` and
    `shares_prefixes`; what changes no output here is ignored with a warning; the rest is refused.

    Args:
        engine: engine directory, or an `Engine` that was loaded before, which no option that says
            how to load may come beside.
        capture: what capturing CUDA graphs may cost here; None is the default.
        dtype: of the target; anything else than the engine's is refused.
        tensor_parallel_size: ranks that have a part of each weight; likewise.
        pipeline_parallel_size: stages; likewise.
        max_logprobs: at most 20 in any case.
        generation_config: whose defaults requests have that leave them out: `auto`, those of the
            checkpoint's generation_config.json; `vllm`, those of `SamplingParams`; or a directory.
        override_generation_config: keys of such a file, over its own.
    Raises:
        ConfigError: a value that no engine has.
    """

    engine: str | Path | Engine | None = None
    plan: str | None = option(None, "One plan for every step, e.g. off or chain-4.")
    policy: Policy | str | None = option(
        None,
        "What chooses plans: measured (the default plan where it is faster than off), goodput (by"
        " load), adaptive (learns how long a chain pays), best, profile, fixed; without it, as"
        " compiled or tuned.",
        type=str,
    )
    adapts_verification: bool = option(
        False,
        "Let the policy goodput choose for each request how many nodes of its tree are verified,"
        " as its own acceptance and the load say (cpu, cuda, eager).",
        "--adaptive-verification",
    )
    confidence_threshold: float = option(
        0.0,
        "End each draft before the first token (of a tree: level) that the drafter's confidence"
        " head gives less than this probability of acceptance (DSpark; cpu, cuda, eager); 0"
        " verifies all. Not for the rules mss and swor.",
        least=0,
        most=1,
    )
    multi_step_ms: float = option(
        20.0,
        "Run steps in a row for up to so many milliseconds before requests are looked at, where"
        " nothing waits and nothing but the plan decides (cpu, one rank): outputs are the same,"
        " tokens of a stream come together. 0 looks after each step.",
        least=0,
        most=1000,
    )
    max_num_seqs: int | None = option(
        None, "Requests that run together; else as compiled.", least=1
    )
    kv_cache_tokens: int | None = option(
        None,
        "Rows of the KV cache, for all requests together: where they run out, the newest gives"
        " way. Else the worst case.",
        shows_default=False,
        least=1,
    )
    offload_weights: str | int | None = option(
        None,
        "Memory that weights of the target may take, such as 700M or 4GB, or auto, what is free:"
        " the others are read from disk in every pass, or on a GPU copied from the host's memory."
        " On CPUs for engines compiled with --segments.",
        type=str,
        metavar="BYTES|auto",
    )
    mmap: bool | None = option(
        None,
        "On CPUs, leave weights in the mapped files, which processes share, or read them into"
        " memory in huge pages, where passes are faster; without it, the second where Linux gives"
        " huge pages and there is room.",
        "--mmap/--no-mmap",
        shows_default=False,
    )
    check_weights: bool = option(
        True,
        "Compare weights with their checksums while they are read, or before they are mapped.",
        "--check-weights/--no-check-weights",
    )
    rank_timeout_s: float = option(
        30.0,
        "Seconds after which a rank of a sharded engine that does not get on counts as lost.",
        "--rank-timeout",
        above=0,
    )
    oversubscribes: bool = option(
        False,
        "Run more ranks of a sharded engine on this machine than it has cores, which is slow.",
        "--oversubscribe",
    )
    overlaps: bool = option(
        False,
        "On CUDA, draft for one half of a batch while the target verifies the other half, from 8"
        " sequences on. Off by default: slower with small models and where passes wait for"
        " weights; not measured with large ones.",
        "--overlap",
    )
    micro_batches: int | None = option(
        None,
        "Batches of different requests that the stages of a pipeline have at once; without it, one"
        " for each stage. 1 is one after the other.",
        least=1,
    )
    backend: str | None = option(
        None, "Run with another backend: eager takes the graphs of any engine."
    )
    num_threads: int | None = option(
        None, "Threads that torch uses; without it, as torch decides.", "--threads"
    )
    verify: bool | None = option(
        None,
        "Compare all files with their hashes, or none; else all but the weights.",
        "--verify/--no-verify",
    )
    structured_outputs_config: Any = option(
        None,
        "Defaults of structured outputs, as JSON: disable_any_whitespace (false),"
        " disable_additional_properties (true), lenient (false).",
        type=str,
        metavar="JSON",
        shows_default=False,
    )
    shares_prefixes: bool = option(
        True,
        "Share rows of prompts that begin with the same tokens.",
        "--prefix-caching/--no-prefix-caching",
        "--enable-prefix-caching/--no-enable-prefix-caching",
    )
    shares_outputs: bool = option(
        True,
        "Let suffix drafts look up what followed in earlier requests' outputs.",
        "--suffix-history/--no-suffix-history",
    )
    shares_unsalted: bool = option(
        True,
        "Share prompts' rows and suffix history between requests without a cache_salt, too; else"
        " between those of equal cache_salt alone.",
        "--share-unsalted/--no-share-unsalted",
    )
    generation_config: str | Path = option(
        _AUTO,
        "Where defaults of sampling come from: auto, the generation_config.json that was compiled;"
        " vllm, none, so that temperature is 1; or a directory that holds such a file.",
        type=str,
        metavar="auto|vllm|DIR",
    )
    override_generation_config: Mapping[str, Any] | None = option(
        None,
        "Settings over those of the file, such as '{\"temperature\": 0.6}'.",
        type=str,
        metavar="JSON",
    )
    max_model_len: int | None = None
    seed: int | None = None
    capture: CaptureLimits | None = None
    dtype: Any = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    max_logprobs: int | None = None

    def __post_init__(self) -> None:
        check_ranges(self)
        check_threads(self.num_threads, "num_threads")
        object.__setattr__(self, "offload_weights", parse_budget(self.offload_weights))
        name = "override_generation_config"
        override = object_of(self.override_generation_config, name, '{"temperature": 0.6}')
        object.__setattr__(self, name, override)
        _ = self._structured_outputs
        if self.seed is not None and (type(self.seed) is not int or self.seed < 0):
            raise ConfigError(f"seed={self.seed!r}", "an integer, 0 or more, or None", "correct it")
        if self.max_logprobs is not None and self.max_logprobs > 20:
            raise ConfigError(
                f"max_logprobs={self.max_logprobs}", "at most 20", "lower it, or leave it out"
            )

    @classmethod
    def of_engine(cls, **given: Any) -> Self:
        """What a caller passed by name, an engine among it.

        Raises:
            ConfigError: an option that specc has not got, with what to do about it; no engine.
        """
        args = cls(**given)
        if args.engine is None:
            raise ConfigError(
                "neither engine nor model", "an engine directory", 'pass it, as in LLM("engine/")'
            )
        return args

    @property
    def directory(self) -> Path:
        """Of the engine, which is not loaded yet.

        Raises:
            ConfigError: it is no path.
            EngineError: it is a checkpoint, or the name of one.
        """
        return engine_directory(self.engine)

    def load(self) -> Engine:
        """Open the engine, unless it is.

        Raises:
            EngineError: the engine cannot be loaded; it is a checkpoint, or the name of one.
            ConfigError: it is another one than these options ask for.
        """
        from specc.runtime.engine import Engine

        engine = self.engine
        if isinstance(engine, Engine):
            self._check_loaded()
        else:
            engine = Engine.load(
                self.directory,
                verify=self.verify,
                num_threads=self.num_threads,
                max_num_seqs=self.max_num_seqs,
                backend=self.backend,
                capture=self.capture,
                kv_cache_tokens=self.kv_cache_tokens,
                rank_timeout_s=self.rank_timeout_s,
                oversubscribes=self.oversubscribes,
                offload_weights=self.offload_weights,
                overlaps=self.overlaps,
                mmap=self.mmap,
                check_weights=self.check_weights,
            )
        check_dtype(engine, self.dtype)
        check_cut(engine, self.tensor_parallel_size, self.pipeline_parallel_size)
        check_length(engine, self.max_model_len)
        if (config := self._structured_outputs) is not None:
            engine.grammars.config = config
        return engine

    def make_core(self) -> EngineCore:
        """Open the engine, and put together what moves its requests.

        Raises:
            EngineError: see `load`.
            ConfigError: see `load`.
            RequestError: the engine has no such plan, or not the plans that the policy needs.
        """
        from specc.runtime.core import EngineCore
        from specc.sampling.generation_config import read_defaults

        engine = self.load()
        defaults = read_defaults(
            engine.directory, self.generation_config, self.override_generation_config
        )
        _say(defaults.told())
        return EngineCore(
            engine,
            self.plan,
            self.policy,
            shares_prefixes=self.shares_prefixes,
            shares_outputs=self.shares_outputs,
            shares_unsalted=self.shares_unsalted,
            max_seq_len=self.max_model_len,
            micro_batches=self.micro_batches,
            adapts_verification=self.adapts_verification,
            confidence_threshold=self.confidence_threshold,
            multi_step_s=self.multi_step_ms / 1000,
            defaults=defaults,
        )

    def of_loaded(self, engine: Engine) -> Self:
        """For an engine that was loaded as these options say; those of loading are left out."""
        plain: dict[str, Any] = {f.name: f.default for f in fields(self) if f.name in _OF_LOADING}
        return replace(self, engine=engine, **plain)

    @property
    def _structured_outputs(self) -> StructuredOutputsConfig | None:
        """Defaults of structured outputs; raises ConfigError: they are none."""
        if self.structured_outputs_config is None:
            return None
        from specc.sampling.structured import StructuredOutputsConfig

        return StructuredOutputsConfig.read(self.structured_outputs_config)

    def _check_loaded(self) -> None:
        """Raises ConfigError: options that would have had to come before the engine was loaded."""
        late = [
            field.name
            for field in fields(self)
            if field.name in _OF_LOADING and getattr(self, field.name) != field.default
        ]
        if late:
            named = ", ".join(late)
            raise ConfigError(
                f"{named}, and an Engine that is loaded",
                "options that say how to load, where the engine is loaded",
                f"pass {'it' if len(late) == 1 else 'them'} to Engine.load, or the directory here",
            )


@answers_names(ENGINE, ConfigError)
@dataclass(frozen=True)
class AsyncEngineArgs(EngineArgs):
    """What `AsyncLLM` and the servers take: requests come at any time, and some have to wait."""

    max_waiting: int = option(
        1024, "Requests that wait at most; more are refused (over HTTP: 503).", least=1
    )
    sleep_after_s: float | None = option(
        None,
        "Seconds without a request after which weights and caches leave memory; the next request"
        " waits until they are back. Else never.",
        "--sleep-after",
        shows_default=False,
        above=0,
    )


@functools.cache
def _say(text: str) -> None:
    """Once in a process, however often the engine is opened."""
    if text:
        logging.getLogger("specc.engine").warning(text)
