"""What does not go together: one table of pairs of features, with the reason and what to do.

`refuse` raises the first pair that a compilation asks for; docs/guide/compatibility.md is the
whole table.
"""

from __future__ import annotations

from specc.compile_request import BACKEND_OPTIONS, Backends, CompileRequest, Feature, Refusal
from specc.features import (
    A_MIX,
    ADAPTERS,
    BITS,
    CALIBRATION,
    CUT_DRAFTS,
    DENSE,
    DRAFT_RANKS,
    DRAFT_WITH_STATES,
    GROUP,
    HEAD,
    HEAD_IN_WINDOW,
    LIKE_TARGET,
    MAPPED,
    MASKS,
    OVER_CACHE,
    PARTS_OF_STATES,
    QUANTIZED_LATENTS,
    RANKS,
    READER,
    RELOAD,
    ROUNDED,
    SEGMENTS,
    SELF_DRAFT,
    SLEEP,
    SOME_MIX,
    STAGES,
    STATES,
    TARGET_QUANTIZED,
    TARGET_SCHEME,
    UNGROUPED,
    UNQUANTIZED,
    WINDOW,
    WINDOW_OF_HEAD,
    chooses_beside,
    in_dtype,
    no_integers,
    one_pass,
    option,
    quantized_checkpoint,
    quantized_ranks,
    rounded_to,
    self_draft,
    some_rounded_to,
    with_value,
    without_blocks,
)


def refuse(request: CompileRequest) -> None:
    """Raises ConfigError: two features are asked for that do not go together."""
    for row in REFUSALS:
        if (error := row.error(request)) is not None:
            raise error


_STAGED = (
    "a target in stages, with models or lookups that draft on rank 0",
    "leave out {option}, or --pipeline-parallel-size",
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
    Refusal(option("kv_cache_dtype"), STAGES, *_STAGED),
    Refusal(SELF_DRAFT, STAGES, *_STAGED),
    Refusal(
        DRAFT_RANKS,
        CUT_DRAFTS,
        "drafts that are one rank's each, or cut for all ranks",
        "leave out one of the two",
    ),
    Refusal(
        GROUP,
        UNGROUPED,
        "--quantize or --draft-quantize int8 or int4: fp8 has one scale for each output, and"
        " llama.cpp's formats have groups of their own",
        "leave out --quantize-group",
    ),
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
            option(name, with_value=False),
            Backends(lambda facts, options, name=name: name in options),  # type: ignore[misc]
            "the backend {backends}, which it is for",
            "pass --backend {taker}, or leave out {option}",
            "{a} with backend {b}",
        )
        for name in BACKEND_OPTIONS
    ),
    Refusal(
        with_value("kv_cache_dtype", "fp8"),
        Backends(lambda facts, options: "fp8" in facts.kv_rows),
        "{option} int8, or the backend {backends}",
        "pass --backend {taker}, or {option} int8",
        "{a} with backend {b}",
    ),
    Refusal(
        QUANTIZED_LATENTS,
        Backends(lambda facts, options: "quantized latent" in facts.attention_extras),
        "latents in the type of the model, keys and values of each head, or the backend {backends}",
        "leave out one of the two, or pass --backend {taker}",
        "{a}, and backend {b}",
    ),
    *(
        Refusal(
            some_rounded_to(kind),
            Backends(lambda facts, options, kind=kind: kind in facts.quantized),  # type: ignore[misc]
            f"{{option}} {{quantized}}, or a backend that reads {kind}: {{list}}",
            "pass --backend {taker}, or {option} {kind}",
            "{a} with backend {b}",
        )
        for kind in ("int8", "int4", "fp8")
    ),
    *(
        Refusal(
            in_dtype(name),
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
            self_draft("--draft self:…,blocks=…", lambda draft, request: chooses_beside(draft)),
            Feature(name, lambda request, is_layers=is_layers: without_blocks(request, is_layers)),  # type: ignore[misc]
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
        Feature("a block drafter, PARD, P-EAGLE, Medusa or Hydra", one_pass),
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
    *(
        Refusal(
            option("batch_invariant", with_value=False),
            other,
            "one rank: the order of sums over several has not been compared with plain decoding's",
            "leave out {option}, or {other}",
            "{a}, and {b}",
        )
        for other in (RANKS, STAGES)
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
        Feature("a quantized checkpoint", quantized_checkpoint),
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
        Feature("quantized weights for several ranks", quantized_ranks),
        Backends(lambda facts, options: facts.cuts_quantized),
        "the backend {backends}, whose ranks have parts of them",
        "pass --backend {taker}, one rank, or weights that are not quantized",
        "{a} with backend {b}",
    ),
    Refusal(
        BITS,
        rounded_to("fp8"),
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
        rounded_to("fp8"),
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
        SOME_MIX,
        Backends(lambda facts, options: "ggml" in facts.quantized),
        "{option} {quantized}, or a backend that reads such blocks: {list}",
        "pass --backend {taker}, or {option} int8",
        "{a} with backend {b}",
    ),
    Refusal(
        CALIBRATION,
        TARGET_SCHEME,
        "a checkpoint in floats, whose weights are rounded",
        "leave out --calibration, or pass the unquantized checkpoint",
        "{a}, and {b}",
    ),
    Refusal(
        BITS,
        Feature("no weights in int8 or int4", no_integers),
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
    *(
        Refusal(
            feature,
            other,
            f"an engine of one rank: others would have to {what} at the same step",
            "leave out {other} when you compile, or start the engine again with what is new",
            "{a} of an engine with {b}",
        )
        for feature, what in ((RELOAD, "take the weights"), (SLEEP, "sleep"))
        for other in (RANKS, STAGES, DRAFT_RANKS)
    ),
    Refusal(
        RELOAD,
        Backends(lambda facts, options: not facts.is_padded),
        "a backend whose programs read weights where they lie: {backends}",
        "compile with --backend {taker}, or start the engine again with the other draft",
        "{a} of an engine of the backend {b}, which keeps copies in forms of its own",
    ),
    Refusal(
        SLEEP,
        Backends(lambda facts, options: not (facts.is_padded or facts.is_on_gpu)),
        "a backend on the host, whose addresses outlive their memory: {backends}",
        "end the process, and start it again when it is needed",
        "{a} of an engine of the backend {b}",
    ),
    Refusal(
        SLEEP,
        SEGMENTS,
        "a target that is one program: segments read their weights ahead of their passes",
        "compile without --segments",
        "{a} of an engine with {b}",
    ),
)
