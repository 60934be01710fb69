"""Options of `specc compile` beside those of `CompileConfig`: drafts, and what they propose."""

from __future__ import annotations

from dataclasses import dataclass

from specc.option import option


@dataclass(frozen=True)
class DraftOptions:
    """What proposes tokens, and in which shape."""

    drafts: tuple[str, ...] = option(
        (),
        "What proposes tokens: a draft model, an EAGLE-3 head, a block drafter, Medusa or Hydra"
        " heads, a Gemma 4 assistant, by directory or hub id; self:window=W,sink=S, the target"
        " itself, which sees the last W and the first S tokens of its context (S is 4 by"
        " default), with blocks=B also"
        " the blocks of B tokens that it attended to most; self:layers=0-3 or self:skip=4-5, the"
        " target by some of its layers, also with ,window=W; self:int8, self:int4 or self:fp8, the"
        " target with rounded weights, also with the others; lookup:N, which"
        " repeats what followed the last N tokens earlier in the request; suffix, which searches"
        " earlier outputs, too; or mtp, the MTP module in the target's own checkpoint. Repeat the"
        " option for several. Without it, the engine does not speculate.",
        "--draft",
        metavar="DRAFT",
    )
    combine: str | None = option(
        None,
        "How several drafts work together: merge verifies all proposals as one tree (the default),"
        " vote verifies the chain that most drafts agree on, best asks for each sequence the model"
        " or the lookup, whichever promises more.",
    )
    trees: tuple[str, ...] = option(
        (),
        "Shape of the proposals: how many children each node of a level gets, or"
        " dynamic:NODES,CHILDREN,LEVELS for a tree that the draft chooses anew at every step, or"
        " budget:N1,N2,… for so many nodes on each level, which go where the draft is surest."
        " Repeat the option for several plans; the first is the default.",
        "--tree",
        metavar="W1,W2,…",
    )
    num_speculative_tokens: int | None = option(
        None,
        "Propose a chain of this many tokens instead of a tree. The default is 4, and 8 for"
        " lookups.",
    )
    speculative_config: str | None = option(
        None,
        "The same in vLLM's form, as JSON: method (draft_model, eagle3, dflash, dspark, dflash2,"
        " medusa, mtp, ngram or suffix), model, num_speculative_tokens and a few more; instead of"
        " --draft, --tree, --combine and --num-speculative-tokens.",
        "--speculative-config",
        "-sc",
        metavar="JSON",
    )
