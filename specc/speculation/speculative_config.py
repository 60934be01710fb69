"""vLLM's `--speculative-config`: an object of JSON that says how to speculate.

Users bring it from vLLM, or from what took its form over. It is read into the drafts and trees that
specc's own options name; what it asks for and specc does not do is refused, not left out.
Source: vLLM, vllm/config/speculative.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from specc.drafters.facts import DrafterFacts
from specc.drafters.registry import ALL, parse_draft
from specc.errors import ConfigError
from specc.speculation.speculative_values import (
    OPTION,
    check_absent,
    integer_of,
    refused,
    shown,
    text_of,
    tree_of,
)
from specc.speculation.tree import TokenTree
from specc.system.json_file import JsonError, parse_json

# names of vLLM's → the kind that they name
_METHODS = {method: facts for facts in ALL for method in facts.methods}
_NAMED = [facts.methods[0] for facts in ALL if facts.methods]
(_NGRAM_NAMES,) = (facts.methods for facts in ALL if facts.compares)
_MODEL, _NGRAM = next(x.methods[0] for x in ALL if x.is_ordinary), _NGRAM_NAMES[0]
# vLLM's other methods, of which a misspelt one is told, too; those of one model end with _mtp
_OTHER_METHODS = (
    "eagle", "mlp_speculator", "custom_class", "extract_hidden_states",
)  # fmt: skip
# tokens that vLLM compares where nothing is said
_NGRAM_TOKENS = 5
_MOST_NGRAM_TOKENS = 99
_KEYS = (
    "method", "model", "num_speculative_tokens", "draft_tensor_parallel_size", "prompt_lookup_max",
    "prompt_lookup_min", "speculative_token_tree",
)  # fmt: skip
_TUNE = "leave it out, and let specc tune choose a plan for each batch size"
_OF_VLLM = "leave it out: it chooses code of vLLM, not what is proposed"
_RULE = "leave it out: how trees are drawn is chosen by request, coupled, delta, mss or swor"
_REVISION = "leave it out, and name the directory of that revision as model"
_SUFFIX = "leave it out: suffix has limits of its own here"
_SYNTHETIC = "leave it out; specc bench --synthetic measures with given acceptance"
# keys of vLLM's that specc does not have: the value that changes nothing, and what to do instead
_OTHER_KEYS: dict[str, tuple[Any, str]] = {
    "enforce_eager": (False, "leave it out; --backend eager compiles no code"),
    "tensor_parallel_size": (None, "write draft_tensor_parallel_size"),
    "quantization": (
        None,
        "leave it out: a checkpoint says itself how it is quantized, and --draft-quantize rounds"
        " one that is not",
    ),
    "kv_cache_dtype": (None, "leave it out, and pass --kv-cache-dtype"),
    "max_model_len": (None, "leave it out; --draft-kv window=W is for drafts of fewer positions"),
    "revision": (None, _REVISION),
    "code_revision": (None, _REVISION),
    "num_speculative_tokens_per_batch_size": (None, _TUNE),
    "disable_by_batch_size": (None, _TUNE),
    "enable_adaptive_verification": (False, "leave it out, and serve with --adaptive-verification"),
    "use_heterogeneous_vocab": (True, "write true or false: a draft's tokens may always differ"),
    "parallel_drafting": (True, "write true or false: a draft's files say whether it reads masks"),
    "rejection_sample_method": ("standard", _RULE),
    "draft_sample_method": (None, _RULE),
    "synthetic_acceptance_rates": (None, _SYNTHETIC),
    "synthetic_acceptance_length": (None, _SYNTHETIC),
    "suffix_decoding_max_tree_depth": (24, _SUFFIX),
    "suffix_decoding_max_cached_requests": (10000, _SUFFIX),
    "suffix_decoding_max_spec_factor": (1.0, _SUFFIX),
    "suffix_decoding_min_token_prob": (0.1, _SUFFIX),
    "moe_backend": (None, _OF_VLLM),
    "attention_backend": (None, _OF_VLLM),
    "draft_load_config": (None, _OF_VLLM),
    "disable_padded_drafter_batch": (False, _OF_VLLM),
    "disable_eagle_block_drop": (False, _OF_VLLM),
    "use_local_argmax_reduction": (False, _OF_VLLM),
    "index_share_for_mtp_iteration": (None, _OF_VLLM),
    "dspark_draft_topk": (None, _OF_VLLM),
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """What such an object asks for, as specc's options say it.

    Args:
        draft: as of `--draft`: a model, a self-draft, `lookup:N` or `suffix`.
        tree: static shape of the proposals; None where none is given.
        num_speculative_tokens: length of a chain; None where none is given, or a tree is.
        draft_tensor_parallel_size: ranks that share the draft; None where it is not said.
    """

    draft: str
    tree: TokenTree | None = None
    num_speculative_tokens: int | None = None
    draft_tensor_parallel_size: int | None = None

    @classmethod
    def read(cls, given: str | Mapping[str, Any]) -> SpeculativeConfig:
        """From JSON, or from what JSON becomes in Python; null is as if a key were not there.

        Raises:
            ConfigError: malformed JSON, a key, a method or a value that specc does not have, or
                keys that contradict each other.
            TreeError: a tree that is too large.
        """
        values = _known(_parse(given) if isinstance(given, str) else given)
        kind = _kind_of(values)
        tree = tree_of(values)
        draft = _reader_of(kind)(values, tree)
        length = integer_of(values, "num_speculative_tokens")
        if tree is not None and length not in (None, tree.num_draft_tokens):
            raise refused(
                f"num_speculative_tokens {length}, and a speculative_token_tree of"
                f" {tree.num_draft_tokens} tokens",
                "as many as the tree has, or no num_speculative_tokens",
                "leave out num_speculative_tokens",
            )
        return cls(
            draft,
            tree,
            length if tree is None else None,
            integer_of(values, "draft_tensor_parallel_size"),
        )

    @property
    def trees(self) -> list[TokenTree]:
        """None or one, as `choose_plans` takes them."""
        return [] if self.tree is None else [self.tree]

    def check_alone(self, **options: Any) -> None:
        """Raises ConfigError: options are given besides that say how to speculate, too.

        Args:
            options: name → value; what is None or empty is not given.
        """
        for name, value in options.items():
            if value is None or (isinstance(value, (tuple, list)) and not value):
                continue
            option = "--" + name.replace("_", "-")
            first = value[0] if isinstance(value, (tuple, list)) else value
            raise ConfigError(
                f"{OPTION} and {option} {shown(str(first))}",
                "one of the two: both say how to speculate",
                f"leave out {option}, or say all of it by options of specc",
            )

    def num_draft_ranks(self, given: int) -> int:
        """Ranks that share the draft.

        Args:
            given: by the option of its own; 1 is its default.
        Raises:
            ConfigError: both are given, and differ.
        """
        own = self.draft_tensor_parallel_size
        if own is not None and given not in (1, own):
            raise ConfigError(
                f"{OPTION}: draft_tensor_parallel_size {own}, and --draft-tensor-parallel-size"
                f" {given}",
                "one number of ranks",
                "leave out one of the two",
            )
        return own or given


def _parse(text: str) -> Mapping[str, Any]:
    try:
        return cast(Mapping[str, Any], parse_json(text, exact=True))
    except JsonError as error:
        raise ConfigError(
            f"{OPTION} {shown(text)}: no JSON ({error})",
            "an object of JSON, in quotes of the shell",
            f"""for example {OPTION} '{{"model": "D/", "num_speculative_tokens": 4}}'""",
        ) from error


def _known(given: Any) -> dict[str, Any]:
    """The keys that specc reads, those that are null left out."""
    if not isinstance(given, Mapping):
        raise refused(
            f"{shown(given)}, a {type(given).__name__}",
            "an object: keys with values",
            'for example {"model": "D/", "num_speculative_tokens": 4}',
        )
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key in _KEYS:
            values[key] = value
        elif key in _OTHER_KEYS:
            neutral, do = _OTHER_KEYS[key]
            # 0 and 1 are no booleans here, although Python says that they are equal
            is_bool = isinstance(value, bool)
            asks = value is not None and not (value is False and isinstance(neutral, bool))
            if asks and (value != neutral or is_bool != isinstance(neutral, bool)):
                raise refused(f"{key} {shown(value)}", f"none of vLLM's {key}", do)
        else:
            close = difflib.get_close_matches(str(key), (*_KEYS, *_OTHER_KEYS), n=1)
            raise refused(
                f"the key {shown(key)}",
                ", ".join(_KEYS),
                f"write {close[0]}" if close else "leave it out",
            )
    return {key: value for key, value in values.items() if value is not None}


def _kind_of(values: Mapping[str, Any]) -> DrafterFacts | None:
    """None where the model says it: a self-draft or a lookup may be named there, too."""
    method = values.get("method")
    if method is None:
        if values.get("model") in _NGRAM_NAMES[:2]:
            return _METHODS[_NGRAM]
        if "model" not in values:
            raise refused(
                "neither method nor model",
                "a draft model, or a method that needs none",
                'add "model": "D/", or "method": "ngram"',
            )
        return None
    if isinstance(method, str) and method in _METHODS:
        return _METHODS[method]
    others = (*_METHODS, *_OTHER_METHODS)
    is_theirs = method in _OTHER_METHODS or str(method).endswith("_mtp")
    close = [] if is_theirs else difflib.get_close_matches(str(method), others, n=1)
    raise refused(
        f"method {shown(method)}",
        f"{', '.join(_NAMED[:-1])} or {_NAMED[-1]}",
        f"write {close[0]}"
        if close and close[0] in _METHODS
        else "name a small model as model, or self:window=512",
    )


def _read_model(values: Mapping[str, Any], tree: TokenTree | None) -> str:
    model = text_of(values, "model")
    if model is None:
        raise refused(
            f"method {_MODEL} without model", "the directory or id of a draft", 'add "model": "D/"'
        )
    if not model:
        raise refused("an empty model", "the directory or id of a draft", "name it")
    drafter = parse_draft(model)
    looks_up = drafter is not None and not drafter.is_asked
    if drafter is not None and looks_up and "method" in values:
        raise refused(
            f"method {_MODEL} and model {shown(model)}",
            "a draft model, or one of the target's self-drafts",
            f"write method {drafter.facts.methods[0]}, or leave method out",
        )
    if looks_up:
        _check_no_ranks(values, f"model {shown(model)}")
        _check_chain(tree, model)
    for name in ("prompt_lookup_max", "prompt_lookup_min"):
        check_absent(
            values, name, f"model {shown(model)}", f"method {_NGRAM}, which looks tokens up"
        )
    return model


def _read_head(values: Mapping[str, Any], tree: TokenTree | None, kind: DrafterFacts) -> str:
    """What reads hidden states, which the files of its directory say that it is."""
    method = kind.methods[0]
    _check_no_ranks(values, f"method {method}")
    model = text_of(values, "model")
    if not model or parse_draft(model) is not None:
        raise refused(
            f"method {method} " + (f"and model {shown(model)}" if model else "without model"),
            "the directory or id of a head or block drafter",
            'add "model": "H/"' if not model else "leave method out, or name a head or drafter",
        )
    return _read_model(values, tree)


def _read_ngram(values: Mapping[str, Any], tree: TokenTree | None) -> str:
    model = values.get("model")
    if model not in (None, _NGRAM, "[ngram]"):
        raise refused(
            f"method {_NGRAM} and model {shown(model)}",
            "one of the two: looked-up tokens need no model",
            "leave out model, or method",
        )
    _check_no_ranks(values, f"method {_NGRAM}")
    _check_chain(tree, f"method {_NGRAM}")
    least = integer_of(values, "prompt_lookup_min")
    longest = integer_of(values, "prompt_lookup_max", _MOST_NGRAM_TOKENS)
    if least is not None and least > 1:
        raise refused(
            f"prompt_lookup_min {least}",
            "1: the longest match counts here, however short it is",
            "leave out prompt_lookup_min",
        )
    # as vLLM has it: a shortest match alone is the longest one, too
    return f"lookup:{longest or least or _NGRAM_TOKENS}"


def _read_bare(values: Mapping[str, Any], tree: TokenTree | None, kind: DrafterFacts) -> str:
    """What needs no name: an index, or the module in the target's checkpoint."""
    method = kind.methods[0]
    for name in ("model", "prompt_lookup_max", "prompt_lookup_min"):
        check_absent(
            values, name, f"method {method}", "no more than num_speculative_tokens besides"
        )
    _check_no_ranks(values, f"method {method}")
    if not kind.has_program:
        _check_chain(tree, f"method {method}")
    return method


def _reader_of(
    kind: DrafterFacts | None,
) -> Callable[[Mapping[str, Any], TokenTree | None], str]:
    if kind is None or kind.is_ordinary:
        return _read_model
    if kind.compares:
        return _read_ngram
    is_bare = kind.is_of_target or not kind.has_program
    return partial(_read_bare if is_bare else _read_head, kind=kind)


def _check_no_ranks(values: Mapping[str, Any], what: str) -> None:
    if (size := integer_of(values, "draft_tensor_parallel_size")) not in (None, 1):
        raise refused(
            f"{what} and draft_tensor_parallel_size {size}",
            "a draft model, whose weights ranks can share: no head, and nothing that is looked up",
            "leave out draft_tensor_parallel_size",
        )


def _check_chain(tree: TokenTree | None, what: str) -> None:
    if tree is not None and len(tree.leaves) > 1:
        raise refused(
            f"{what} and a speculative_token_tree with branches",
            "a chain: one continuation is looked up",
            "write num_speculative_tokens instead of speculative_token_tree",
        )
