"""Options of `SamplingParams`, by the names of its fields."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from specc.option import option


@dataclass(frozen=True)
class SamplingOptions:
    """How outputs are drawn, and what ends them; None and () leave it as the engine says."""

    max_tokens: int | None = option(
        None, "Output tokens at most, for each prompt; else as the checkpoint says, or 128."
    )
    temperature: float | None = option(
        None, "0 is greedy, the most likely token; else as the checkpoint says, or 1."
    )
    top_p: float | None = option(
        None, "Draw from the likeliest tokens that hold this share; 1 is all."
    )
    top_k: int | None = option(None, "Draw from the k likeliest tokens; 0 is all.")
    min_p: float | None = option(
        None,
        "Draw from tokens that are at least this share as likely as the likeliest one; 0 is all.",
    )
    repetition_penalty: float | None = option(
        None,
        "Divide logits of tokens that came before, in prompt or output; 1 is none, else as the"
        " checkpoint says.",
    )
    presence_penalty: float = option(
        0.0, "Lower logits of tokens that are in the output; 0 is none."
    )
    frequency_penalty: float = option(
        0.0, "Lower logits of tokens by this, as often as they are in the output; 0 is none."
    )
    seed: int | None = option(None, "Draw the same tokens again, with any draft and plan.")
    rule: str | None = option(None, "How trees are drawn: coupled, delta, mss, swor; lossless.")
    logprobs: int | None = option(
        None, "Log probabilities of the output's tokens and of the N likeliest; with --json."
    )
    n: int = option(1, "Outputs of each prompt; the seed of each is one higher.")
    stop: tuple[str, ...] = option((), "Text that ends the output; repeatable.")
    ignore_eos: bool = option(False, "Go on after end-of-sequence tokens.")
    lora: str | None = option(
        None, "Run the target with this adapter, by the name that it was compiled with."
    )
    min_tokens: int = option(0, "Output tokens before anything may end it.")
    logit_bias: tuple[str, ...] = option(
        (),
        "Add a number from -100 to 100 to the logit of a token id; repeatable.",
        metavar="ID=BIAS",
    )
    bad_words: tuple[str, ...] = option(
        (), "Text that the output must not hold; repeatable.", "--bad-word"
    )
    allowed_token_ids: tuple[int, ...] = option(
        (), "Draw from the token ids given so alone; repeatable.", "--allowed-token-id"
    )

    def given(self, *names: str) -> dict[str, Any]:
        """Options of `SamplingParams`, without those that are None or empty.

        Args:
            names: of fields; none is all.
        Raises:
            RequestError: a bias of another form.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {
            # lists, as in Python and in files of prompts
            name: [*value] if isinstance(value, tuple) else value
            for name, value in values.items()
            if value not in (None, ()) and (not names or name in names)
        }
        if "logit_bias" in given:
            from specc.sampling.logit_controls import parse_bias

            given["logit_bias"] = parse_bias(given["logit_bias"])
        return given

    def unused_when_greedy(self) -> list[str]:
        """Names of the options that were given and that only a temperature gives a meaning."""
        drawing = ("seed", "rule", "top_p", "top_k", "min_p")
        return [
            f"--{name.replace('_', '-')}" for name in drawing if getattr(self, name) is not None
        ]
