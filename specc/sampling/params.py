"""Options of one request: when to stop, and how tokens are drawn."""

from __future__ import annotations

import dataclasses
import enum
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specc.close_name import advice
from specc.errors import RequestError
from specc.sampling.logit_controls import check_controls, check_ids, checked_bias
from specc.sampling.rows import RULES, Rule
from specc.sampling.structured import StructuredOutputsParams
from specc.vllm.answers import answers_names
from specc.vllm.sampling_options import SAMPLING

# whether it came from Python, the command line or HTTP
_DO = "correct this value"
_MAX_SEED = (1 << 63) - 1
# lowest and highest value, and whether the lowest itself is allowed
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, math.inf, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.0, math.inf, False),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
}
MAX_LOGPROBS = 20
# outputs of one prompt
MAX_OUTPUTS = 128


class RequestOutputKind(enum.Enum):
    """What `AsyncLLM` yields, by vLLM's names: all so far, what is new, or the end alone."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@answers_names(SAMPLING)
@dataclass(frozen=True)
class SamplingParams:
    """Options of one request, named as vLLM's users know them.

    What `structured_outputs`, `allowed_token_ids`, `bad_words` and `min_tokens` forbid, and
    `logit_bias`, come first, then penalties, temperature, min_p, top_k and top_p, as in vLLM. An
    output that they leave no token to go on with ends with the reason `error`. An option may be
    assigned: it is checked, and holds for requests that are made later.

    Args:
        max_tokens: output tokens at most; None goes on to the end of the context.
        temperature: 0 is greedy: the most likely token, whatever the filters say. The default is
            1, as vLLM's; defaults of the checkpoint are those of `LLM.get_default_sampling_params`.
        top_p: keep the most likely tokens that hold this share of the probability.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens of at least this share of the best one's probability.
        repetition_penalty: logits of tokens of prompt and output are divided by it where positive,
            multiplied where negative; 1 is none.
        presence_penalty: taken off the logit of every token of the output.
        frequency_penalty: taken off as often as the token is in the output.
        seed: the same seed gives the same tokens, with any draft, tree and batch; None draws one.
            With the rules mss and swor, the same tokens need the same plan, too.
        rule: how trees are drawn and verified, `coupled`, `delta`, `mss` or `swor`; each is
            lossless. None is coupled.
        n: outputs of the prompt, which is computed once. With a seed, output i has seed + i (modulo
            2^63) and is what a request with that seed gives alone; without one, each draws its own.
        logprobs: log probabilities of each output token and of this many best ones, at most 20;
            they are the model's own, before penalties and temperature. None gives none.
        prompt_logprobs: the same of each token of the prompt but the first, which nothing comes
            before. Its rows are then computed, whatever earlier requests have left.
        stop: strings that end the output; the text is cut before the first of them.
        stop_token_ids: further token ids that end the output, next to the model's EOS ids; each
            one of the engine's vocabulary.
        ignore_eos: go on after EOS.
        include_stop_str_in_output: keep the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        speculative: False decodes this request plainly.
        structured_outputs: what the output must look like: JSON of a schema, a regex, a choice or
            a grammar, see `docs/guide/structured.md`. None is any text.
        min_tokens: output tokens at least: before, neither EOS nor one of `stop_token_ids` can be
            drawn, with `ignore_eos` either, and no stop string ends the output.
        logit_bias: token id → number from -100 to 100 that is added to its logit.
        allowed_token_ids: the output holds these tokens alone, EOS included. None allows all.
        bad_words: the output holds none of them. Each is tokenized as it is and after a space; the
            last token of either cannot be drawn where the output ends with those before it. At most
            1,024 words of 16,384 characters together.
        lora: the adapter that the target runs with, by the name that `specc compile --lora` gave
            it; None is none.
        output_kind: what `AsyncLLM` yields; nobody else asks.
    Raises:
        RequestError: a value is outside its range.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    rule: str | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    speculative: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: tuple[str, ...] | list[str] | None = None
    lora: str | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stop_strings: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        if self.max_tokens is not None and type(self.max_tokens) is not int:
            raise RequestError(
                f"max_tokens={self.max_tokens!r}", "an integer, 1 or more, or None", _DO
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens={self.max_tokens}", "1 or more", "raise max_tokens")
        object.__setattr__(self, "stop_strings", self._checked_stop())
        for name, (low, high, is_closed) in _RANGES.items():
            _check_number(name, getattr(self, name), low, high, is_closed)
        self._check_integers()
        structured = self.structured_outputs
        if structured is not None and not isinstance(structured, StructuredOutputsParams):
            raise RequestError(
                f"structured_outputs of type {type(structured).__name__}",
                "StructuredOutputsParams, or None",
                _DO,
            )
        if self.lora is not None and (not isinstance(self.lora, str) or not self.lora):
            raise RequestError(f"lora={self.lora!r}", "the name of an adapter, or None", _DO)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError(
                f"output_kind={self.output_kind!r}",
                f"RequestOutputKind: {', '.join(kind.name for kind in RequestOutputKind)}",
                _DO,
            )
        if self.rule is not None and self.rule not in RULES:
            do = advice(str(self.rule), RULES, _DO)
            raise RequestError(f"rule={self.rule!r}", f"one of {', '.join(RULES)}, or None", do)
        check_controls(self.min_tokens, self.max_tokens, self.allowed_token_ids, self.bad_words)
        object.__setattr__(self, "logit_bias", checked_bias(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_controls(self) -> bool:
        """Logits are changed, or tokens forbidden, before penalties; see `docs/guide/drafts.md`.

        A structure of the output is none of these.
        """
        is_limited = self.allowed_token_ids is not None
        return bool(self.min_tokens or self.logit_bias or self.bad_words) or is_limited

    @property
    def rule_id(self) -> Rule:
        return Rule.COUPLED if self.rule is None else Rule[self.rule.upper()]

    def each(self) -> list[SamplingParams]:
        """Options of the n outputs, one for each; the first one alone looks at the prompt."""
        if self.n == 1:
            return [self]
        seeds = [
            None if self.seed is None else (self.seed + i) % (_MAX_SEED + 1) for i in range(self.n)
        ]
        first = dataclasses.replace(self, n=1)
        return [
            dataclasses.replace(
                first, seed=seed, prompt_logprobs=self.prompt_logprobs if i == 0 else None
            )
            for i, seed in enumerate(seeds)
        ]

    def _checked_stop(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) for text in stop):
            raise RequestError(f"stop={self.stop!r}", "a string or a list of strings", _DO)
        if "" in stop:
            raise RequestError("an empty stop string", "non-empty stop strings", "remove it")
        check_ids("stop_token_ids", self.stop_token_ids)
        return tuple(stop)

    def _check_integers(self) -> None:
        if type(self.top_k) is not int or not -1 <= self.top_k <= _MAX_SEED:
            raise RequestError(
                f"top_k={self.top_k!r}", "an integer: 1 or more, 0 or -1 for all", _DO
            )
        if self.seed is not None and (
            type(self.seed) is not int or not 0 <= self.seed <= _MAX_SEED
        ):
            raise RequestError(
                f"seed={self.seed!r}", f"an integer in 0 … {_MAX_SEED}, or None", _DO
            )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and (type(count) is not int or not 0 <= count <= MAX_LOGPROBS):
                raise RequestError(
                    f"{name}={count!r}", f"an integer in 0 … {MAX_LOGPROBS}, or None", _DO
                )
        if type(self.n) is not int or not 1 <= self.n <= MAX_OUTPUTS:
            raise RequestError(f"n={self.n!r}", f"an integer in 1 … {MAX_OUTPUTS}", _DO)


def _assign(self: SamplingParams, name: str, value: Any) -> None:
    """Change an option, as programs for vLLM do; requests that were handed in keep theirs.

    Raises:
        RequestError: the value is outside its range, beside the others; nothing changes then.
        AttributeError: there is no such option.
    """
    if name not in {one.name for one in dataclasses.fields(self) if one.init}:
        raise AttributeError(f"SamplingParams has no option {name!r} to assign")
    vars(self).update(vars(dataclasses.replace(self, **{name: value})))


# dataclasses refuse to see it in the class: frozen, they are hashable, and compared by value
SamplingParams.__setattr__ = _assign  # type: ignore[method-assign, assignment]


def _check_number(name: str, value: Any, low: float, high: float, is_closed: bool) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_inside = is_number and (low <= value if is_closed else low < value) and value <= high
    if is_inside:
        # the steps compute in float32; also not infinite, and not NaN, which compares as neither
        rounded = _as_float32(value)
        if math.isfinite(rounded) and (is_closed or low < rounded):
            return
    upper = "" if high == math.inf else f" and at most {high:g}"
    lower = f"at least {low:g}" if is_closed else f"above {low:g}"
    raise RequestError(f"{name}={value!r}", f"a finite number {lower}{upper}", _DO)


def _as_float32(value: float) -> float:
    try:
        return struct.unpack("f", struct.pack("f", float(value)))[0]
    except OverflowError:
        return math.inf
