"""What a compilation may ask for, as far as something else does not go with it: features.

`specc/refusals.py` is the table of pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from specc.artifact.mixes import MIXES
from specc.compile_request import CompileRequest, Feature
from specc.drafters.facts import Cache
from specc.quantize_options import has_groups


def _flag(name: str) -> str:
    """The option of a field."""
    return "--" + name.replace("_", "-")


def option(name: str, *, with_value: bool = True) -> Feature:
    """A field of the options that has not its default."""

    def given(request: CompileRequest) -> str | None:
        value = getattr(request.config, name)
        if value == getattr(type(request.config), name):
            return None
        return f"{_flag(name)} {value}" if with_value else _flag(name)

    return Feature(_flag(name), given)


def self_draft(name: str, matches: Callable[[Any, CompileRequest], bool]) -> Feature:
    """The first self-draft that matches."""

    def given(request: CompileRequest) -> str | None:
        found = (draft for draft in request.self_drafts if matches(draft, request))
        return next((f"--draft {draft.option}" for draft in found), None)

    return Feature(name, given)


def with_value(name: str, value: Any) -> Feature:
    """A field of the options that has this value."""
    found = f"{_flag(name)} {value}"
    return Feature(found, lambda x: found if getattr(x.config, name) == value else None)


def rounded_to(*kinds: str, name: str | None = None) -> Feature:
    """The target's weights are rounded to one of these."""
    return Feature(
        f"--quantize {name or kinds[0]}",
        lambda x: f"--quantize {x.config.quantize}" if x.config.quantize in kinds else None,
    )


def some_rounded_to(*kinds: str, name: str | None = None) -> Feature:
    """Likewise, or those of a draft model."""
    of_target = rounded_to(*kinds, name=name)

    def given(request: CompileRequest) -> str | None:
        drafts = (x for x in request.config.draft_quantize if x in kinds)
        return of_target.given(request) or _first(f"--draft-quantize {x}" for x in drafts)

    return Feature(f"{of_target.name}, or --draft-quantize", given)


def in_dtype(name: str) -> Feature:
    """A model of this type."""
    return Feature(f"dtype {name}", lambda x: f"dtype {name}" if name in x.dtypes else None)


def _windows(request: CompileRequest) -> Iterator[tuple[str, str]]:
    """Draft models that attend to some of their rows, and the option."""
    # of the options alone it is not known for how many drafts they are
    rows_of = request.config.kv_windows_of(request.num_drafts) if request.num_drafts else ()
    for number, rows in enumerate(rows_of[1:]):
        if rows is not None:
            yield f"draft_{number}", f"--draft-kv {rows.option}"


def _first(found: Iterator[str]) -> str | None:
    return next(found, None)


def one_pass(request: CompileRequest, reads_tokens: bool = False) -> str | None:
    """A draft that proposes all levels in one pass, of any kind or of those that read tokens."""
    models = (x for plan in request.plans or () for x in plan.models if x.is_one_pass)
    found = (x for x in models if not (reads_tokens and x.facts.reads_hidden))
    return _first(f"a {x.facts.called} ({x.name})" for x in found)


def quantized_checkpoint(request: CompileRequest) -> str | None:
    """Of the target or of a draft."""
    schemes = request.schemes.items()
    return _first(f"a quantized checkpoint ({x.replace('_', ' ')}: {y})" for x, y in schemes)


def quantized_ranks(request: CompileRequest) -> str | None:
    """Integers or fp8 that are cut."""
    # drafts are cut for as many, or not at all
    ranks, are_cut = request.config.tensor_parallel_size, CUT_DRAFTS.given(request) is not None
    kinds = ("int8", "int4", "fp8", *MIXES)
    is_asked = ranks > 1 and request.has_weights_in(*kinds, with_drafts=are_cut)
    return f"quantized weights for {ranks} ranks" if is_asked else None


def no_integers(request: CompileRequest) -> str | None:
    """Nothing that has rows of integers to multiply with."""
    # before checkpoints are opened nothing is known of their integers
    if not request.dtypes or request.has_weights_in("int8", "int4", *MIXES):
        return None
    return "without weights in int8 or int4"


def _no_groups(config: Any) -> str | None:
    """Formats whose groups cannot be chosen, or none."""
    asked = [*(f"--quantize {x}" for x in [config.quantize] if x)]
    asked += [f"--draft-quantize {x}" for x in config.draft_quantize]
    if any(has_groups(x.split()[1]) for x in asked):
        return None
    return asked[0] if asked else "no weights in int8 or int4"


def chooses_beside(draft: Any) -> bool:
    """It chooses blocks, and is a second program of the target."""
    return bool(draft.has_second_program and draft.view and draft.view.chosen)


def without_blocks(request: CompileRequest, with_layers: bool) -> str | None:
    """What one may ask for in place of chosen blocks and a second program."""
    for draft in filter(chooses_beside, request.self_drafts):
        if with_layers is bool(draft.layers):
            plain = replace(draft, view=replace(draft.view, chosen=0))
            return f"--draft {plain.option}, or --draft {draft.view.option}"
    return None


SELF_DRAFT = self_draft("--draft self:…", lambda draft, request: True)
ROUNDED = self_draft("--draft self:int8, int4 or fp8", lambda draft, request: bool(draft.weights))
LIKE_TARGET = self_draft(
    "--draft self:int8, int4 or fp8",
    lambda draft, request: (
        bool(draft.weights) and draft.quantization == request.config.quantization
    ),
)
READER = Feature(
    "a draft that reads hidden states",
    lambda request: "a draft that reads hidden states" if request.reads_hidden else None,
)
HEAD = Feature("a draft that reads hidden states", lambda x: _first(iter(x.heads.values())))
WINDOW = Feature("--draft-kv", lambda request: _first(option for _, option in _windows(request)))
WINDOW_OF_HEAD = Feature(
    "--draft-kv",
    lambda request: _first(x for name, x in _windows(request) if name in request.heads),
)
HEAD_IN_WINDOW = Feature(
    HEAD.name,
    lambda request: _first(request.heads[x] for x, _ in _windows(request) if x in request.heads),
)
OVER_CACHE = Feature(
    "a draft over the target's cache with weights of its own",
    lambda request: _first(
        f"the {x.facts.called} {x.name}, which attends to keys and values of the target"
        for plan in request.known_plans
        for x in plan.models
        if x.facts.cache is Cache.TARGET
    ),
)
SEGMENTS = option("segments", with_value=False)
STAGES = option("pipeline_parallel_size")
DRAFT_RANKS, CUT_DRAFTS = option("draft_ranks"), option("draft_tensor_parallel_size")
RANKS = option("tensor_parallel_size")
GROUP, BITS = option("quantize_group"), option("activation_bits")
CALIBRATION = option("calibration")
ADAPTERS = option("lora", with_value=False)
A_MIX = rounded_to(*MIXES, name="q4_k_m and the like")
SOME_MIX = some_rounded_to(*MIXES, name="q4_k_m and the like")
DENSE = Feature(
    "--block-size 0", lambda request: None if request.config.block_size else "--block-size 0"
)
TARGET_QUANTIZED = Feature(
    "--quantize",
    lambda x: x.config.quantization and f"a target whose weights are in {x.config.quantization}",
)
TARGET_SCHEME = Feature(
    "a quantized checkpoint",
    lambda x: f"a quantized checkpoint ({x.schemes['target']})" if "target" in x.schemes else None,
)
MAPPED = Feature(
    "a draft with other tokens than the target's",
    lambda x: f"{next(iter(x.mapped))}, whose tokens are other ones" if x.mapped else None,
)
MASKS = Feature("a PARD model", lambda request: one_pass(request, reads_tokens=True))
STATES = Feature(
    "a target whose layers keep states (hybrids)",
    lambda x: "a target whose layers keep states" if x.keeps_states else None,
)
DRAFT_WITH_STATES = Feature(
    "a draft model whose layers keep states, or a self-draft of such a target",
    lambda x: (
        _first(f"{name}, a draft whose layers keep states" for name in x.stateful_drafts)
        or (SELF_DRAFT.given(x) if x.keeps_states else None)
    ),
)
PARTS_OF_STATES = Feature(
    "a hybrid for several ranks or stages",
    lambda x: (RANKS.given(x) or STAGES.given(x)) if x.keeps_states else None,
)
QUANTIZED_LATENTS = Feature(
    "--mla-cache latent with --kv-cache-dtype",
    lambda x: (
        f"--mla-cache latent with {rows}"
        if x.config.mla_cache == "latent" and (rows := option("kv_cache_dtype").given(x))
        else None
    ),
)
UNQUANTIZED = Feature("no --quantize", lambda x: None if x.config.quantize else "no --quantize")
UNGROUPED = Feature("no weights in int8 or int4", lambda request: _no_groups(request.config))
RELOAD = Feature(
    "new weights of a draft (reload_draft)",
    lambda x: "reload_draft" if "reload_draft" in x.while_running else None,
)
SLEEP = Feature("sleep", lambda x: "sleep" if "sleep" in x.while_running else None)
