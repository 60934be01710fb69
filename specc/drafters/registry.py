"""Kinds of drafts by name, and drafts of options and of JSON: where strings become drafters."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specc.close_name import close_name
from specc.drafters import (
    assistant,
    block,
    domino,
    eagle3,
    hydra,
    lilicorr,
    lookup,
    medusa,
    model,
    mtp,
    pard,
    peagle,
    suffix,
    uno,
    xpress,
)
from specc.drafters import self as self_draft
from specc.drafters.assistant import AssistantDraft
from specc.drafters.block import BlockDraft
from specc.drafters.domino import DominoDraft
from specc.drafters.drafter import Drafter
from specc.drafters.facts import DrafterFacts
from specc.drafters.feature_head import FeatureHead
from specc.drafters.hydra import HydraHeads, PrefixHydraHeads
from specc.drafters.lilicorr import LiLiCorrDraft
from specc.drafters.medusa import MedusaHeads
from specc.drafters.model import PREFIX as PREFIX
from specc.drafters.model import ModelDraft
from specc.drafters.one_pass import OnePass
from specc.drafters.pard import PardDraft
from specc.drafters.peagle import PeagleDraft
from specc.drafters.xpress import XPressDraft
from specc.errors import ConfigError, EngineError

# all kinds, in the order in which people are told of them
ALL: tuple[DrafterFacts, ...] = (
    model.FACTS,
    pard.FACTS,
    eagle3.FACTS,
    peagle.FACTS,
    block.FACTS,
    block.DSPARK_FACTS,
    block.DFLASH2_FACTS,
    lilicorr.FACTS,
    domino.FACTS,
    xpress.FACTS,
    medusa.FACTS,
    hydra.FACTS,
    hydra.PREFIX_FACTS,
    mtp.FACTS,
    assistant.FACTS,
    lookup.FACTS,
    suffix.FACTS,
    self_draft.FACTS,
    uno.FACTS,
)
_KINDS = {facts.kind: facts for facts in ALL}
_MODEL = re.compile(rf"{PREFIX}\d+")
# kinds of heads, and of drafts of one pass, that plans name; other heads are alike
_HEADS: dict[str, type[ModelDraft]] = {assistant.FACTS.kind: AssistantDraft}
_OWN_ENTRIES = (
    HydraHeads, PrefixHydraHeads, PardDraft, PeagleDraft, LiLiCorrDraft, DominoDraft, XPressDraft,
)  # fmt: skip
_ONE_PASS = {x.facts.kind: x for x in _OWN_ENTRIES}
# those that no model has to be compiled for; the last one is no name of a path
_WITHOUT_MODEL = (suffix.Suffix, lookup.Lookup, uno.Uno, self_draft.SelfDraft)
# of other programs
_OTHER_NAMES = {"ngram": "lookup:3", "[ngram]": "lookup:3", "prompt_lookup": "lookup:3"}
FIRST = (ModelDraft(),)


def facts_of(kind: str) -> DrafterFacts:
    """Raises EngineError: nobody knows this kind."""
    if kind not in _KINDS:
        known = ", ".join(facts.kind for facts in ALL if facts.reads_hidden)
        raise EngineError(f"a draft of kind {kind!r:.40}", known, "compile the engine again")
    return _KINDS[kind]


def kind_of_target(text: str) -> DrafterFacts | None:
    """The kind that `--draft` names which is in a target's checkpoint; None of others."""
    return next((facts for facts in ALL if facts.is_of_target and facts.kind == text), None)


def parse_draft(text: Any) -> Drafter | None:
    """What `--draft` names that is no model; None of a model.

    Raises:
        ConfigError: it begins like one, and is malformed.
    """
    if not isinstance(text, (str, Path)):
        return None
    kinds = _WITHOUT_MODEL if isinstance(text, str) else _WITHOUT_MODEL[:-1]
    return next((found for kind in kinds if (found := kind.parse(str(text))) is not None), None)


def drafter_of(name: str | Drafter) -> Drafter:
    """A draft by its name in a plan; one of a model is an ordinary model.

    Raises:
        ConfigError: no such name.
    """
    if isinstance(name, Drafter):
        return name
    found = next((one for kind in _WITHOUT_MODEL if (one := kind.named(name)) is not None), None)
    if found is None and _MODEL.fullmatch(name):
        return ModelDraft(int(name.removeprefix(PREFIX)))
    if found is None:
        raise ConfigError(
            f"a plan of the draft {name!r}",
            "draft_0, draft_1, …, self_wW_sS, self_l0toL, lookup-N or suffix",
            "compile the engine again",
        )
    return found


def model_draft(number: int) -> Drafter:
    """An ordinary model, by its place among those of drafts."""
    return ModelDraft(number)


def head_draft(number: int, kind: str = "") -> Drafter:
    """A head that is asked level by level.

    Args:
        kind: of it; steps of all but a few are the same.
    """
    return _HEADS.get(kind, FeatureHead)(number)


def drafters_of(*names: str | Drafter) -> tuple[Drafter, ...]:
    """Several of them, see `drafter_of`."""
    return tuple(map(drafter_of, names))


def drafters_from_json(
    names: Sequence[str],
    heads: Collection[str],
    blocks: Iterable[Mapping[str, Any]],
    kinds: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Drafter, ...]:
    """What a plan of JSON has.

    Args:
        heads: of those that are asked level by level and read hidden states.
        blocks: of those that propose all levels in one pass.
        kinds: head → what kind it is, where its steps are its kind's.
    Raises:
        ConfigError: see `drafter_of`.
        EngineError: see `OnePass.from_json`.
    """
    own = {block.draft: block for block in map(one_pass_from_json, blocks)}
    if unknown := sorted({*kinds.values()} - _HEADS.keys()):
        raise EngineError(
            f"a plan with a head of kind {unknown[0]!r:.40}",
            ", ".join(_HEADS),
            "compile the engine again",
        )
    own_heads = {x: head_draft(int(x.removeprefix(PREFIX)), kinds.get(x, "")) for x in heads}
    if strays := {*own, *own_heads, *kinds} - set(names):
        raise EngineError(
            f"a plan of {', '.join(names)}, and what {', '.join(sorted(strays))} is",
            "what its drafts are",
            "compile the engine again",
        )
    return tuple(own.get(name) or own_heads.get(name) or drafter_of(name) for name in names)


def one_pass_from_json(data: Mapping[str, Any]) -> OnePass:
    """Raises EngineError: no draft that proposes all levels in one pass."""
    if isinstance(data, OnePass):
        return data
    named = data if isinstance(data, Mapping) else {}
    kind = _ONE_PASS.get(str(named.get("kind", "")), BlockDraft)
    return (MedusaHeads if kind is BlockDraft and named.get("is_flat") else kind).from_json(data)


def meant_draft(text: str) -> str | None:
    """What proposes without a model of its own, where `text` was probably meant to say so.

    Args:
        text: as written for a draft, and no model.
    """
    kind, colon, rest = text.partition(":")
    if kind.lower() in _OTHER_NAMES:
        return _OTHER_NAMES[kind.lower()]
    # values are kept where there are some: `lookp:5` is `lookup:5`
    values = {lookup.FACTS.kind: "3", self_draft.FACTS.kind: "window=512"}
    close = close_name(kind, (suffix.FACTS.kind, mtp.FACTS.kind, *values))
    if close is None or close not in values:
        return close
    return f"{close}:{rest if colon else values[close]}"
