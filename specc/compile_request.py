"""What a compilation asks for, and how two features of it that do not go together are described."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specc.artifact.backends import BackendFacts, backend_names, facts_of
from specc.errors import ConfigError

# options that not every backend takes; `BackendFacts.options` says which it does
BACKEND_OPTIONS = (
    "compute_capability", "decomposable_attention", "tensor_parallel_size",
    "draft_tensor_parallel_size", "draft_ranks", "segments", "kv_cache_dtype",
    "pipeline_parallel_size", "quantize", "draft_quantize", "weight_fragments", "activation_bits",
    "lora", "batch_invariant",
)  # fmt: skip


@dataclass(frozen=True)
class CompileRequest:
    """What a compilation asks for, as far as it is known; checked again whenever more is.

    Args:
        config: a `CompileConfig`, which imports this module.
        plans: of the engine; None are those of the options.
        backend: of the engine, where it is chosen.
        options: of `BACKEND_OPTIONS` that the compiler of this backend takes.
        num_drafts: draft models.
        reads_hidden: some draft reads the target's hidden states.
        heads: draft model that reads hidden states → what errors call it.
        mapped: draft models whose tokens are other ones than the target's.
        schemes: model → how its checkpoint is quantized, where it is.
        dtypes: of the models.
        keeps_states: layers of the target keep states, which is known once it is traced.
        stateful_drafts: draft models whose layers keep states.
        while_running: what is asked of the engine once it runs, by the names of its methods.
    """

    config: Any
    plans: Sequence[Any] | None = None
    backend: BackendFacts | None = None
    options: Collection[str] = ()
    num_drafts: int = 0
    reads_hidden: bool = False
    heads: Mapping[str, str] = field(default_factory=dict)
    mapped: Collection[str] = ()
    schemes: Mapping[str, str] = field(default_factory=dict)
    dtypes: Sequence[str] = ()
    keeps_states: bool = False
    stateful_drafts: Collection[str] = ()
    while_running: Collection[str] = ()

    @property
    def known_plans(self) -> Sequence[Any]:
        """Of the engine, or of the options."""
        found: Sequence[Any] = self.config.plans if self.plans is None else self.plans
        return found

    @property
    def self_drafts(self) -> list[Any]:
        return [draft for plan in self.known_plans for draft in plan.self_drafts]

    def has_weights_in(self, *kinds: str, with_drafts: bool = True) -> bool:
        """Some weights are rounded to one of these, or are integers of a checkpoint.

        Args:
            with_drafts: count what draft models alone are rounded to.
        """
        rounded = {draft.weights for draft in self.self_drafts} | {self.config.quantize}
        rounded |= set(self.config.draft_quantize if with_drafts else ())
        return bool(self.schemes) or not rounded.isdisjoint(kinds)


class Feature(NamedTuple):
    """Something that users ask for.

    Args:
        name: in the documentation.
        given: how it was asked for, as errors call it; None where it was not.
    """

    name: str
    given: Callable[[CompileRequest], str | None]


class Backends(NamedTuple):
    """Backends that lack something.

    Args:
        has: what others have: of facts, and options that the compiler takes.
    """

    has: Callable[[BackendFacts, Collection[str]], bool]

    def given(self, request: CompileRequest) -> str | None:
        facts = request.backend
        return None if facts is None or self.has(facts, request.options) else facts.name

    @property
    def takers(self) -> list[str]:
        return [x for x in backend_names() if self.has(facts_of(x), facts_of(x).options)]

    @property
    def name(self) -> str:
        lacking = [x for x in backend_names() if x not in self.takers]
        return f"backends {', '.join(lacking)}"


class Refusal(NamedTuple):
    """Two features that do not go together.

    Args:
        one: the first, {a} in the texts; {option} is its first word.
        other: the second, {b}, {other} its first word; of backends, {backends} and {list} are those
            that one may choose, and {taker} the first of them.
        needed: the reason, as errors say it.
        do: advice.
        found: what errors begin with.
    """

    one: Feature
    other: Feature | Backends
    needed: str
    do: str
    found: str = "{a} and {b}"

    def error(self, request: CompileRequest) -> ConfigError | None:
        """None where not both are asked for."""
        if (a := self.one.given(request)) is None or (b := self.other.given(request)) is None:
            return None
        words = self.words(a, b, request.backend)
        return ConfigError(*(x.format(**words) for x in (self.found, self.needed, self.do)))

    def words(self, a: str, b: str, facts: BackendFacts | None = None) -> dict[str, str]:
        """What stands for names in braces."""
        words = {"a": a, "b": b, "option": a.split()[0], "other": b.split()[0]}
        if isinstance(self.other, Backends) and (takers := self.other.takers):
            words |= {"backends": " or ".join(takers), "taker": takers[0]}
            words["list"] = ", ".join(takers)
        if facts is not None:
            kinds, dtypes = facts.quantized, facts.dtypes
            words |= {"quantized": " or ".join(kinds), "kind": next(iter(kinds), "")}
            words |= {"dtypes": " or ".join(dtypes), "dtype": dtypes[-1]}
        return words
