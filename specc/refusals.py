"""What does not go together: one table of pairs of features, with the reason and what to do.

`refuse` raises the first pair that a compilation asks for; docs/guide/compatibility.md is the
whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from specc.artifact.mixes import MIXES
from specc.compile_request import BACKEND_OPTIONS, Backends, CompileRequest, Feature, Refusal
from specc.drafters.facts import Cache


def refuse(request: CompileRequest) -> None:
    """Raises ConfigError: two features are asked for that do not go together."""
    for row in REFUSALS:
        if (error := row.error(request)) is not None:
            raise error


def flag_of(name: str) -> str:
    """The option of a field."""
    return "--" + name.replace("_", "-")


def _option(name: str, *, with_value: bool = True) -> Feature:
    """A field of the options that has not its default."""

    def given(request: CompileRequest) -> str | None:
        value = getattr(request.config, name)
        if value == getattr(type(request.config), name):
            return None
        return f"{flag_of(name)} {value}" if with_value else flag_of(name)

    return Feature(flag_of(name), given)


def _self_draft(name: str, matches: Callable[[Any, CompileRequest], bool]) -> Feature:
    def given(request: CompileRequest) -> str | None:
        found = (draft for draft in request.self_drafts if matches(draft, request))
        return next((f"--draft {draft.option}" for draft in found), None)

    return Feature(name, given)


def _kind(kind: str) -> Feature:
    quantize = f"--quantize {kind}"
    return Feature(quantize, lambda request: quantize if request.config.quantize == kind else None)


def _dtype(name: str) -> Feature:
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


def _one_pass(request: CompileRequest, reads_tokens: bool = False) -> str | None:
    """A draft that proposes all levels in one pass, of any kind or of those that read tokens."""
    models = (x for plan in request.plans or () for x in plan.models if x.is_one_pass)
    found = (x for x in models if not (reads_tokens and x.facts.reads_hidden))
    return _first(f"a {x.facts.called} ({x.name})" for x in found)


def _quantized_checkpoint(request: CompileRequest) -> str | None:
    schemes = request.schemes.items()
    return _first(f"a quantized checkpoint ({x.replace('_', ' ')}: {y})" for x, y in schemes)


def _quantized_ranks(request: CompileRequest) -> str | None:
    # drafts are cut for as many, or not at all
    ranks = request.config.tensor_parallel_size
    is_asked = ranks > 1 and request.has_weights_in("int8", "int4", "fp8", *MIXES)
    return f"quantized weights for {ranks} ranks" if is_asked else None


def _no_integers(request: CompileRequest) -> str | None:
    # before checkpoints are opened nothing is known of their integers
    if not request.dtypes or request.has_weights_in("int8", "int4", *MIXES):
        return None
    return "without weights in int8 or int4"


def _chooses_beside(draft: Any) -> bool:
    """It chooses blocks, and is a second program of the target."""
    return bool(draft.has_second_program and draft.view and draft.view.chosen)


def _without_blocks(request: CompileRequest, with_layers: bool) -> str | None:
    """What one may ask for in place of chosen blocks and a second program."""
    for draft in filter(_chooses_beside, request.self_drafts):
        if with_layers is bool(draft.layers):
            plain = replace(draft, view=replace(draft.view, chosen=0))
            return f"--draft {plain.option}, or --draft {draft.view.option}"
    return None


SELF_DRAFT = _self_draft("--draft self:…", lambda draft, request: True)
ROUNDED = _self_draft("--draft self:int8, int4 or fp8", lambda draft, request: bool(draft.weights))
LIKE_TARGET = _self_draft(
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
SEGMENTS = _option("segments", with_value=False)
STAGES = _option("pipeline_parallel_size")
DRAFT_RANKS, CUT_DRAFTS = _option("draft_ranks"), _option("draft_tensor_parallel_size")
RANKS = _option("tensor_parallel_size")
GROUP, BITS = _option("quantize_group"), _option("activation_bits")
CALIBRATION = _option("calibration")
ADAPTERS = _option("lora", with_value=False)
A_MIX = Feature(
    "--quantize q4_k_m and the like",
    lambda x: f"--quantize {x.config.quantize}" if x.config.quantize in MIXES else None,
)
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
MASKS = Feature("a PARD model", lambda request: _one_pass(request, reads_tokens=True))
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
UNQUANTIZED = Feature("no --quantize", lambda x: None if x.config.quantize else "no --quantize")

_STAGED = (
    "a target in stages, with models or lookups that draft on rank 0",
    "leave out {option}, or --pipeline-parallel-size",
)
_ONE_SCALE = (
    "--quantize int8 or int4: fp8 has one scale for each output",
    "leave out --quantize-group",
)
_WITHOUT = "leave out {other}, or choose another draft"
_NO_BITS = "pass --quantize int8 or int4, or leave out --activation-bits"

# in the order in which they are looked for
REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        SEGMENTS,
        STAGES,
        "one of the two: a stage is one program, whose weights stay in memory",
        "leave out --segments, or --pipeline-parallel-size",
    ),
    Refusal(CUT_DRAFTS, STAGES, *_STAGED),
    Refusal(DRAFT_RANKS, STAGES, *_STAGED),
    Refusal(_option("kv_cache_dtype"), STAGES, *_STAGED),
    Refusal(SELF_DRAFT, STAGES, *_STAGED),
    Refusal(
        DRAFT_RANKS,
        CUT_DRAFTS,
        "drafts that are one rank's each, or cut for all ranks",
        "leave out one of the two",
    ),
    Refusal(GROUP, UNQUANTIZED, *_ONE_SCALE, found="{a}"),
    Refusal(GROUP, _kind("fp8"), *_ONE_SCALE),
    Refusal(
        ROUNDED,
        SEGMENTS,
        "whole programs: segments have one copy of their weights",
        "leave out one of the two",
    ),
    Refusal(
        LIKE_TARGET,
        TARGET_QUANTIZED,
        "weights that differ from the target's",
        "leave out --quantize, or choose another draft",
        "{a}, and {b}, too",
    ),
    Refusal(
        ROUNDED,
        Backends(lambda facts, options: "quantize" in options),
        "the backend {backends}, which reads quantized weights",
        "pass --backend {taker}, or another draft",
        "{a} with backend {b}",
    ),
    *(
        Refusal(
            _option(name, with_value=False),
            Backends(lambda facts, options, name=name: name in options),  # type: ignore[misc]
            "the backend {backends}, which it is for",
            "pass --backend {taker}, or leave out {option}",
            "{a} with backend {b}",
        )
        for name in BACKEND_OPTIONS
    ),
    *(
        Refusal(
            _kind(kind),
            Backends(lambda facts, options, kind=kind: kind in facts.quantized),  # type: ignore[misc]
            f"--quantize {{quantized}}, or a backend that reads {kind}: {{list}}",
            "pass --backend {taker}, or --quantize {kind}",
            "{a} with backend {b}",
        )
        for kind in ("int8", "int4", "fp8")
    ),
    *(
        Refusal(
            _dtype(name),
            Backends(lambda facts, options, name=name: name in facts.dtypes),  # type: ignore[misc]
            "{dtypes}, or one of the backends {list}",
            "pass --dtype {dtype}, or --backend {taker}",
            "{a} for the backend {b}",
        )
        for name in ("float32", "bfloat16", "float16")
    ),
    Refusal(
        SELF_DRAFT,
        Backends(lambda facts, options: facts.takes_views),
        "a backend that reads it in blocks: {backends}",
        "pass --backend {taker}, or another draft",
        "{a} and the backend {b}, whose programs read the cache of a sequence as a whole",
    ),
    Refusal(
        SELF_DRAFT,
        DENSE,
        "a cache in blocks, of which the draft sees some",
        "leave out --block-size",
        "{a} and {b}, one block for each sequence",
    ),
    *(
        Refusal(
            _self_draft("--draft self:…,blocks=…", lambda draft, request: _chooses_beside(draft)),
            Feature(name, lambda request, is_layers=is_layers: _without_blocks(request, is_layers)),  # type: ignore[misc]
            "one of the two: blocks are chosen for the target's own program, and fewer layers or"
            " other weights are a second one",
            "pass {b}",
            f"{{a}}: blocks, and {what}",
        )
        for name, what, is_layers in (
            ("self:layers=… or skip=…", "some of the layers", True),
            ("self:int8, int4 or fp8", "other weights", False),
        )
    ),
    Refusal(
        WINDOW,
        Backends(lambda facts, options: not facts.is_padded),
        "a backend that reads it in blocks: {backends}",
        "pass --backend {taker}, or leave out --draft-kv",
        "{a} and the backend {b}, whose masks have no sink and whose passes read the whole cache",
    ),
    Refusal(
        Feature("a block drafter, PARD, P-EAGLE, Medusa or Hydra", _one_pass),
        Backends(lambda facts, options: facts.fills_blocks),
        "a backend that such drafts have run on: {backends}",
        "pass --backend {taker}, or another draft",
        "{a}, and the backend {b}",
    ),
    Refusal(
        READER,
        Backends(lambda facts, options: not facts.is_padded),
        "a backend of flat tokens: {backends}",
        "pass --backend {taker}, or another draft",
        "{a}, and the backend {b}, whose caches have no place for them",
    ),
    *(
        Refusal(
            READER,
            other,
            "a target whose layers are one program, which keeps them",
            "leave out {other}, or choose another draft",
            "{a}, and {b}",
        )
        for other in (SEGMENTS, STAGES)
    ),
    *(
        Refusal(
            option,
            HEAD,
            "drafts that rank 0 has, whole: it reads the hidden states there",
            "leave out {option}",
            "{a}, and {b}",
        )
        for option in (CUT_DRAFTS, DRAFT_RANKS)
    ),
    *(
        Refusal(
            ADAPTERS,
            other,
            "a target that is one program on one rank, beside whose products adapters are",
            "leave out {other}, or merge the adapter into the target's weights",
        )
        for other in (RANKS, STAGES, SEGMENTS)
    ),
    Refusal(
        RANKS,
        OVER_CACHE,
        "one rank, which has all heads of the target's cache",
        "leave out {option}, or choose another draft",
        "{a}, and {b}",
    ),
    Refusal(
        WINDOW_OF_HEAD,
        HEAD_IN_WINDOW,
        "a draft model of its own: this one sees what its layers were trained to see",
        "leave out --draft-kv",
        "{a}, and {b}",
    ),
    Refusal(
        CUT_DRAFTS,
        MAPPED,
        "a whole vocabulary on each rank that drafts: the target's ids are chosen from it",
        "leave {option} at 1: rank 0 drafts alone",
        "{a}, and {b} than the target's",
    ),
    Refusal(
        MASKS,
        MAPPED,
        "a draft of the target's tokens: none of these stands for its mask",
        "choose a PARD model of the target's family, or another draft",
        "{a}, and {b} than the target's",
    ),
    Refusal(
        Feature("a quantized checkpoint", _quantized_checkpoint),
        Backends(lambda facts, options: "quantize" in options),
        "the backend {backends}: no other reads quantized weights",
        "pass --backend {taker}, or the unquantized checkpoint",
        "{a} with backend {b}",
    ),
    Refusal(
        ROUNDED,
        TARGET_SCHEME,
        "a checkpoint in floats, whose weights are rounded for the draft",
        "choose another draft: this one would read the target's own integers",
        "{a}, and {b}",
    ),
    Refusal(
        Feature("quantized weights for several ranks", _quantized_ranks),
        Backends(lambda facts, options: facts.cuts_quantized),
        "the backend {backends}, whose ranks have parts of them",
        "pass --backend {taker}, one rank, or weights that are not quantized",
        "{a} with backend {b}",
    ),
    Refusal(
        BITS,
        _kind("fp8"),
        "weights in int8 or int4: rows by fp8 stay floats, all but the head's",
        _NO_BITS,
    ),
    Refusal(
        CALIBRATION,
        UNQUANTIZED,
        "--quantize int4 or int8: it is weights that are rounded",
        "pass --quantize int4, or leave out --calibration",
        "{a}, and {b}",
    ),
    Refusal(
        CALIBRATION,
        _kind("fp8"),
        "weights in int8 or int4",
        "pass --quantize int8 or int4, or leave out --calibration",
        "{a}, and {b}",
    ),
    Refusal(
        CALIBRATION,
        A_MIX,
        "weights in int8 or int4",
        "pass --quantize int8 or int4, or leave out --calibration",
        "{a}, and {b}",
    ),
    Refusal(
        A_MIX,
        Backends(lambda facts, options: "ggml" in facts.quantized),
        "--quantize {quantized}, or a backend that reads such blocks: {list}",
        "pass --backend {taker}, or --quantize int8",
        "{a} with backend {b}",
    ),
    Refusal(GROUP, A_MIX, "formats that have groups of their own", "leave out --quantize-group"),
    Refusal(
        CALIBRATION,
        TARGET_SCHEME,
        "a checkpoint in floats, whose weights are rounded",
        "leave out --calibration, or pass the unquantized checkpoint",
        "{a}, and {b}",
    ),
    Refusal(
        BITS,
        Feature("no weights in int8 or int4", _no_integers),
        "weights in int8 or int4",
        _NO_BITS,
        "{a} {b}",
    ),
    Refusal(
        STATES,
        Backends(lambda facts, options: facts.keeps_states),
        "a backend whose programs have them: {backends}",
        "pass --backend {taker}",
        "{a}, and the backend {b}",
    ),
    Refusal(
        PARTS_OF_STATES,
        Backends(lambda facts, options: facts.keeps_states and not facts.is_captured),
        "the backend {backends}: ranks that replay captured steps do not fold states yet",
        "pass --backend {taker}, or compile for one rank",
        "{a} with layers that keep states, and the backend {b}",
    ),
    Refusal(
        DRAFT_WITH_STATES,
        Backends(lambda facts, options: facts.drafts_keep_states),
        "a backend whose steps tell drafts of states: {backends}",
        "pass --backend {taker}, or another draft",
        "{a}, and the backend {b}",
    ),
    *(
        Refusal(DRAFT_WITH_STATES, other, needed, _WITHOUT, "{a}, and {b}")
        for other, needed in (
            (RANKS, "one rank, which has all states that the draft reads"),
            (STAGES, "one rank, which has all states that the draft reads"),
            (SEGMENTS, "a target that is one program"),
        )
    ),
)
