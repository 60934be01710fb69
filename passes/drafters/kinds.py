"""Which kind of draft a directory holds, by its configuration and the names of its tensors.

A directory that says nothing of the sort is an ordinary model, which drafts by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from specc.drafters import domino, lilicorr, xpress
from specc.errors import HeadError
from specc.passes.drafters.head_spec import (
    DEEPSPEC,
    DFLASH,
    DFLASH2,
    DSPARK,
    EAGLE_CONFIG,
    FASTER_DECODING,
    SAFEAILAB,
    SPECFORGE,
    SPECULATORS,
    VLLM,
    ZLAB,
)

_NEEDED = (
    "an EAGLE-3 or 3.1 head, a DFlash (1 or 2), DSpark, LiLiCorr, Domino or XPress drafter, Medusa"
    " heads in files of vLLM or FasterDecoding, Hydra heads of zankner/Hydra, a Gemma 4 assistant,"
    " or an ordinary language model"
)
_DO = "pass such a head of this target, a smaller model with its tokens, or --draft self:…"
_FIRST_LAYERS = ("midlayer.", "layers.0.")
# keys of DFlash, and of those that go on from it
_DFLASH_KEY, _PROJECTOR = "dflash_config", "projector_type"
_DEEPSPEC_CLASS = "Qwen3Eagle3Model"
# classes of DSpark's drafters, and whose they are
_DSPARK_CLASSES = {"Qwen3DSparkModel": DEEPSPEC, "DSparkDraftModel": SPECFORGE}
LILICORR, DOMINO, XPRESS = (x.FACTS.kind for x in (lilicorr, domino, xpress))
_DSPARK, _DFLASH2, _LILICORR = "DSpark", "DFlash 2", "LiLiCorr"
_DOMINO, _XPRESS = "Domino", "XPress"
# kinds of block drafters beside DFlash, and what people call them
_CALLED = {
    DSPARK: _DSPARK, DFLASH2: _DFLASH2, LILICORR: _LILICORR, DOMINO: _DOMINO, XPRESS: _XPRESS,
}  # fmt: skip
# model type, and part of names of classes; keys and tensors that no other model has
_MEDUSA = "medusa"
_MEDUSA_KEYS = ("medusa_num_heads", "num_medusa_heads")
_MEDUSA_TENSORS = re.compile(r"^(medusa_heads?\.|blocks\.\d+\.layers\.\d+\.)")
_VLLM_TENSORS = re.compile(r"^(medusa_heads\.)?(blocks\.\d+\.layers|lm_heads)\.\d+\.")
_FASTER_TENSORS = re.compile(r"^(medusa_heads?\.)?\d+\.\d+\.(linear\.)?weight$")
# values of `speculators_model_type`
_OTHER_METHODS = {
    "eagle": "EAGLE 1 or 2",
    "dspark": _DSPARK,
    "dflash2": _DFLASH2,
    "xpress": _XPRESS,
    "mtp": "MTP modules",
    "peagle": "P-EAGLE",
    "p_eagle": "P-EAGLE",
    "medusa": "Medusa heads in files of speculators",
    "hydra": "Hydra",
    "mlp": "an MLP speculator",
    "mlp_speculator": "an MLP speculator",
}
# what a class in `architectures` contains, in small letters; the first one counts
_OTHER_CLASSES = (
    ("dspark", _DSPARK),
    (DFLASH2, _DFLASH2),
    ("peagle", "P-EAGLE"),
    (_MEDUSA, "Medusa"),
    ("hydra", "Hydra"),
    ("mlpspeculator", "an MLP speculator"),
    (LILICORR, _LILICORR),
    (XPRESS, _XPRESS),
    ("mtp", "MTP modules"),
)
# keys of a configuration that no other model has
_OTHER_KEYS = (
    ("markov_rank", _DSPARK),
    ("dspark_block_size", "DSpark of DeepSeek V4"),
    ("selector_rank", _DFLASH2),
    ("hydra_num_heads", "Hydra"),
    ("medusa_num_heads", "Medusa"),
    ("ptd_token_id", "P-EAGLE"),
)
# of P-EAGLE: values of `speculators_model_type`, and keys that masks of other files have
_PEAGLE_METHODS = ("peagle", "p_eagle")
_PEAGLE_KEYS = ("pard_token", "ptd_token_id", "mask_token_id")
# names of tensors that no other model has
_OTHER_TENSORS = (
    (_MEDUSA_TENSORS, "Medusa"),
    (re.compile(r"^hydra_head\."), "Hydra"),
    (re.compile(r"^markov_head\."), _DSPARK),
    (re.compile(r"^candidate_selector\."), _DFLASH2),
    (re.compile(r"^lilicorr\."), _LILICORR),
    (re.compile(r"^prefix_gru\."), _DOMINO),
    (re.compile(r"^refiner_head\."), _XPRESS),
    (re.compile(r"^mask_hidden$"), "P-EAGLE"),
)


def medusa_layout_of(config: Mapping[str, Any], tensors: Iterable[str]) -> str | None:
    """Whose layout of Medusa heads this is; None of what is none. Arguments as of `layout_of`."""
    names = list(tensors)
    classes = " ".join(_classes(config)).lower()
    is_named = config.get("model_type") == _MEDUSA or _MEDUSA in classes
    is_said = is_named or any(key in config for key in _MEDUSA_KEYS)
    if config.get("speculators_model_type") is not None:
        return None
    if not is_said and not any(_MEDUSA_TENSORS.search(item) for item in names):
        return None
    if any(_VLLM_TENSORS.search(item) for item in names):
        return VLLM
    is_theirs = any(_FASTER_TENSORS.search(item) for item in names)
    return FASTER_DECODING if is_theirs or not is_named else VLLM


def block_layout_of(
    config: Mapping[str, Any], tensors: Iterable[str], name: str
) -> tuple[str, str] | None:
    """Kind and layout of a block drafter, see `HeadSpec`; None of what is none.

    Arguments and errors as of `layout_of`.
    """
    classes, method = _classes(config), config.get("speculators_model_type")
    kind = _block_kind(config, classes, method)
    if kind is None:
        return None
    if other := _other_kind(config, list(tensors), classes, method, _CALLED.get(kind, "")):
        raise HeadError(f"{name}: {other}", _NEEDED, _DO)
    if method is not None:
        return kind, SPECULATORS
    return kind, next((_DSPARK_CLASSES[x] for x in classes if x in _DSPARK_CLASSES), ZLAB)


def _block_kind(config: Mapping[str, Any], classes: list[str], method: Any) -> str | None:
    """Which kind of block drafter, if any."""
    if method is not None:
        return method if method in (DFLASH, DSPARK, DFLASH2, XPRESS) else None
    if any(item in _DSPARK_CLASSES for item in classes):
        return DSPARK
    named = [kind for kind in (LILICORR, DFLASH2) for x in classes if kind in x.lower()]
    if named:
        return named[0]
    if _DFLASH_KEY not in config and not any(DFLASH in item.lower() for item in classes):
        return None
    nested = config.get(_DFLASH_KEY)
    said = nested.get(_PROJECTOR) if isinstance(nested, Mapping) else None
    said = config.get(_PROJECTOR) if said is None else said
    return DOMINO if said == DOMINO else DFLASH


def peagle_layout_of(config: Mapping[str, Any], tensors: Iterable[str]) -> str | None:
    """Whose layout of P-EAGLE heads this is; None of what is none. Arguments as of `layout_of`."""
    method = config.get("speculators_model_type")
    if method is not None:
        return SPECULATORS if method in _PEAGLE_METHODS else None
    classes = " ".join(_classes(config)).lower()
    masks = any(config.get(key) is not None for key in _PEAGLE_KEYS)
    is_said = "peagle" in classes or ("eagle" in classes and masks)
    if not is_said and "mask_hidden" not in tensors:
        return None
    return EAGLE_CONFIG if "eagle_config" in config else SAFEAILAB


def layout_of(config: Mapping[str, Any], tensors: Iterable[str], name: str) -> str | None:
    """Whose layout of EAGLE-3 files this is; None of a model that is no head.

    Args:
        config: contents of config.json.
        tensors: names in the checkpoint; none of one that cannot be read.
        name: what the user called it, for errors.
    Raises:
        HeadError: a draft of another kind, or of a method that is not known.
    """
    names = list(tensors)
    method = config.get("speculators_model_type")
    classes = _classes(config)
    if other := _other_kind(config, names, classes, method):
        raise HeadError(f"{name}: {other}", _NEEDED, _DO)
    is_eagle3 = any("eagle3" in item.lower() for item in classes)
    if method == "eagle3":
        return SPECULATORS
    if method is not None:
        raise HeadError(f"{name}: speculators_model_type {method!r:.40}", _NEEDED, _DO)
    if _DEEPSPEC_CLASS in classes:
        return DEEPSPEC
    if "eagle_config" in config:
        return EAGLE_CONFIG
    has_parts = "fc.weight" in names and any(
        item.startswith(prefix) for item in names for prefix in _FIRST_LAYERS
    )
    if is_eagle3 or has_parts or "draft_vocab_size" in config:
        return SAFEAILAB
    if any(item.lower().startswith("eagle") for item in classes):
        raise HeadError(f"{name}: EAGLE 1 or 2 ({classes[0]})", _NEEDED, _DO)
    return None


def _classes(config: Mapping[str, Any]) -> list[str]:
    found = config.get("architectures")
    return [item for item in found if isinstance(item, str)] if isinstance(found, list) else []


def _other_kind(
    config: Mapping[str, Any], names: list[str], classes: list[str], method: Any, own: str = ""
) -> str | None:
    """What kind of draft it is that specc does not run, or not as its own, and what says so."""
    if isinstance(method, str) and _OTHER_METHODS.get(method, own) != own:
        return f"{_OTHER_METHODS[method]} (speculators_model_type {method})"
    for part, kind in _OTHER_CLASSES:
        for item in classes:
            if kind != own and part in item.lower():
                return f"{kind} (architectures: {item})"
    # which has the key of PARD models, too; without hidden states they are ordinary ones
    if "pard_token" in config and any("eagle" in item.lower() for item in classes):
        return "P-EAGLE (config.json has pard_token)"
    for key, kind in _OTHER_KEYS:
        if kind != own and key in config:
            return f"{kind} (config.json has {key})"
    for pattern, kind in _OTHER_TENSORS:
        for item in names:
            if kind != own and pattern.search(item):
                return f"{kind} (the checkpoint has {item})"
    if names and all(item.startswith("mtp.") for item in names):
        return f"MTP modules (the checkpoint has {names[0]})"
    return None
