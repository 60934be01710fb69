"""Options of requests that vLLM and transformers have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specc.vllm.answers import Answer, Ignored, Renamed, Unsupported


def _renamed(name: str) -> Unsupported:
    return Unsupported(f"{name}, as it is called here", f"pass {name}", ())


def _no_beams(*idle: Any) -> Unsupported:
    return Unsupported(
        "greedy decoding or sampling: a beam search keeps other outputs than the target's own",
        "leave it out; n gives several outputs of one prompt",
        (None, *idle),
    )


_CONTROLS = (
    "use the controls that exist: penalties, temperature and filters, stop_token_ids, and"
    " structured_outputs for what an output must look like"
)
SAMPLING: Mapping[str, Answer] = {
    "best_of": Unsupported("n outputs, all of which come back", "pass n, and choose among them"),
    "use_beam_search": _no_beams(False),
    "beam_width": _no_beams(1),
    "num_beams": _no_beams(1),
    "length_penalty": _no_beams(1),
    "early_stopping": _no_beams(False),
    "logits_processors": Unsupported(
        "options that the engine itself applies: a processor would be Python between verification"
        " and acceptance, once for every node of every tree, and is no part of an engine",
        _CONTROLS,
        (None, [], ()),
    ),
    "detokenize": Unsupported("text and token ids, which both come", "leave it out", (None, True)),
    "truncate_prompt_tokens": Unsupported(
        "a prompt that fits", "cut the token ids of the prompt before you pass them"
    ),
    "guided_decoding": Renamed("structured_outputs"),
    "spaces_between_special_tokens": Unsupported(
        "text as the tokenizer decodes it", "leave it out, or decode token_ids", (None, True)
    ),
    "flat_logprobs": Unsupported("a dict for each token", "leave it out", (None, False)),
    "skip_reading_prefix_cache": Unsupported(
        "what the engine was loaded with", "load it with shares_prefixes=False", (None, False)
    ),
    "extra_args": Unsupported("options of specc", "leave it out", (None, {})),
    "thinking_token_budget": Unsupported("max_tokens", "lower max_tokens"),
    "output_text_buffer_length": Ignored("stop strings need no length", (None, 0)),
    "skip_clone": Ignored(),
    "max_new_tokens": _renamed("max_tokens"),
    "max_length": Unsupported("max_tokens, which counts output tokens only", "pass max_tokens", ()),
    "min_length": Unsupported("an output's own length", "pass ignore_eos=True and max_tokens"),
    "num_return_sequences": _renamed("n"),
    "do_sample": Unsupported("temperature: 0 is greedy", "pass temperature", ()),
    "stop_strings": _renamed("stop"),
    "eos_token_id": _renamed("stop_token_ids"),
    "random_seed": _renamed("seed"),
    "speculate": _renamed("speculative"),
}
# of StructuredOutputsParams, and of GuidedDecodingParams, as they were called
STRUCTURED: Mapping[str, Answer] = {
    "backend": Ignored("llguidance compiles all grammars", (None, "auto", "guidance")),
    "backend_was_auto": Ignored(),
    "disable_fallback": Ignored("there is one library for grammars, and no other to fall back to"),
    "structural_tag": Unsupported(
        "json, regex, choice or grammar", "write the tags and what is between them as a grammar"
    ),
    "_backend": Ignored(),
    "_backend_was_auto": Ignored(),
}
