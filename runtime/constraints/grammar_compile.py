"""From the text of a grammar to the library's object; in this process, or in a child."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from specc.errors import RequestError
from specc.runtime.constraints.json_schema import prepared
from specc.sampling.structured import SWITCHES, StructuredOutputsConfig, StructuredOutputsParams
from specc.system.extras import install_command

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

DO = "correct this value"
# between the parts of JSON, as llama.cpp has it: without a bound, a model that has nothing to say
# fills the context
_WHITE_SPACE = r" |\n{1,2}[ \t]{0,20}"
_OWN_END = "<|end of a grammar|>"
# tokens whose texts are compared, and characters of a text in an error
_NUM_CHECKED = 256
_MAX_TEXT = 160
DEAD_END = "the grammar has a dead end: nothing may follow, and the output is not complete"
# what the library calls that
_NO_EXTENSION = "NoExtensionBias"
# what has a meaning in the library's regexes, or may get one
_SPECIAL = re.compile(r"[^\w\s]|_", re.ASCII)


class Ends(NamedTuple):
    """Token ids that end an output; `is_own` where the model has none, and one was made up."""

    ids: tuple[int, ...]
    is_own: bool


@dataclass(frozen=True)
class Vocabulary:
    """What the library has to know of tokens; plain data.

    Args:
        tokenizer: as JSON, with the end in it that was made up.
        num_ids: token ids of a mask; V or more.
        limits: of the library's work, by the names of `LLParserLimits`; none is its default.
    """

    tokenizer: str
    num_ids: int
    ends: Ends
    limits: Mapping[str, Any]

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Vocabulary:
        ids, is_own = data["ends"]
        return cls(**{**data, "ends": Ends(tuple(ids), is_own)})

    def to_data(self) -> dict[str, Any]:
        return asdict(self)

    def open(self) -> LLTokenizer:
        """Raises RequestError: the library cannot read it."""
        ids = [*self.ends.ids]
        try:
            return library().LLTokenizer(self.tokenizer, n_vocab=self.num_ids, eos_token=ids)
        except ValueError as error:
            raise not_understood(str(error)) from error


class GrammarSource(NamedTuple):
    """What a grammar is compiled from; see `StructuredOutputsParams`."""

    kind: str
    text: str
    disable_any_whitespace: bool
    disable_additional_properties: bool
    whitespace_pattern: str | None
    lenient: bool
    free_openings: tuple[str, ...]

    @classmethod
    def of(cls, params: StructuredOutputsParams, config: StructuredOutputsConfig) -> GrammarSource:
        """What a request asks for, with the engine's defaults."""
        source = cls._make(params.key)
        unsaid = {name: getattr(config, name) for name in SWITCHES if getattr(source, name) is None}
        return source._replace(**unsaid)


def read_vocabulary(
    tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: set[int], limits: Any
) -> tuple[Vocabulary, LLTokenizer]:
    """The vocabulary of an engine, checked against its tokenizer.

    Raises:
        RequestError: there is no tokenizer, or the library reads it otherwise.
    """
    if tokenizer is None:
        raise RequestError(
            "a request for structured outputs",
            "a tokenizer: without one, which this engine is, nobody knows a token's text",
            "compile the engine from a model with tokenizer.json",
        )
    known = {i for i in tokenizer.get_vocab().values() if i < vocab_size}
    ends, own = Ends(tuple(sorted(eos_token_ids & known)), False), tokenizer
    if not ends.ids:
        # the library needs one; `GrammarState` keeps it out of masks
        own = type(tokenizer).from_str(tokenizer.to_str())
        own.add_special_tokens([_OWN_END])
        own_end = own.token_to_id(_OWN_END)
        assert own_end is not None, "it was added"
        ends = Ends((own_end,), True)
    num_ids = max(vocab_size, 1 + max(own.get_vocab().values()))
    vocabulary = Vocabulary(own.to_str(), num_ids, ends, _limits_as_data(limits))
    tokens = vocabulary.open()
    _check_texts(tokenizer, tokens, sorted(known))
    return vocabulary, tokens


def grammar_of(source: GrammarSource, tokens: LLTokenizer) -> str:
    """The grammar as the library writes it.

    Raises:
        RequestError: it does not understand the text.
    """
    form = _form_of(source)
    if not source.free_openings:
        return form
    first, *others = json.loads(form)["grammars"]
    openings = " | ".join(_lark_of(opening, tokens) for opening in source.free_openings)
    either = f"start: @form | free\nfree: ({openings}) <[*]>*\n"
    start = {"name": "start", "lark_grammar": either}
    return json.dumps({"grammars": [start, first | {"name": "form"}, *others]})


def _form_of(source: GrammarSource) -> str:
    kind, text = source.kind, source.text
    if kind == "choice":
        # as rules, each item were one of a row of its parser, which takes 2,000 of them
        kind, text = "regex", "|".join(map(_literal, json.loads(text)))
    try:
        if kind != "json":
            return library().grammar_from(kind, text)
        schema, said = prepared(text, source.disable_additional_properties)
        options: dict[str, Any] = {"lenient": True} if source.lenient else {}
        if source.whitespace_pattern is not None:
            options["whitespace_pattern"] = source.whitespace_pattern
        elif source.disable_any_whitespace:
            options["whitespace_flexible"] = False
        elif not said & {"whitespace_pattern", "whitespace_flexible"}:
            options["whitespace_pattern"] = _WHITE_SPACE
        return library().LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except (ValueError, RecursionError) as error:
        raise refused(source, str(error)) from error


def matcher_of(
    source: GrammarSource, grammar: str, tokens: LLTokenizer, vocabulary: Vocabulary
) -> LLMatcher:
    """The grammar, ready for its first mask. Needs stack for every rule that another one names.

    Raises:
        RequestError: the library cannot compile it.
    """
    limits = library().LLParserLimits(**vocabulary.limits)
    matcher = library().LLMatcher(tokens, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise refused(source, matcher.get_error())
    return matcher


def library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(
            "a request for structured outputs, and no llguidance",
            "the package llguidance, which knows the grammars",
            install_command("structured"),
        ) from error
    return llguidance


def refused(source: GrammarSource, message: str) -> RequestError:
    return RequestError(
        f"{source.kind} {shortened(source.text)!r}: {shortened(message)}",
        f"what llguidance {library().__version__} can compile",
        DO,
    )


def not_understood(message: str) -> RequestError:
    return RequestError(
        f"a tokenizer whose tokens the grammars cannot read: {shortened(message)}",
        "a byte-level tokenizer, or one with byte fallback",
        "leave out structured_outputs, or compile the engine with another tokenizer.json",
    )


def shortened(text: str) -> str:
    """One line for an error; what the library adds about its own state is left out."""
    text = text.partition("\n<state>")[0].partition("\n<backtrace>")[0]
    # of a long text, only the beginning is looked at
    line = " ".join(text[: 10 * _MAX_TEXT].split())
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…"


def is_dead_end(matcher: LLMatcher) -> bool:
    """Whether a matcher has failed because no token may follow."""
    return bool(matcher.is_error()) and matcher.get_error().startswith(_NO_EXTENSION)


def error_of(matcher: LLMatcher) -> str:
    """Why a matcher has failed."""
    return DEAD_END if is_dead_end(matcher) else shortened(matcher.get_error())


def _lark_of(text: str, tokens: LLTokenizer) -> str:
    """A text in the library's dialect of Lark, where special tokens are no text."""
    parts, rest = [], text
    for token_id in tokens.tokenize_str(text):
        if tokens.is_special_token(token_id):
            before, _, rest = rest.partition(tokens.decode_str([token_id]))
            parts += [json.dumps(before)] * bool(before) + [f"<[{token_id}]>"]
    return " ".join(parts + [json.dumps(rest)] * bool(rest))


def _literal(text: str) -> str:
    return _SPECIAL.sub(lambda match: f"\\x{{{ord(match[0]):x}}}", text)


def _limits_as_data(limits: Any) -> dict[str, Any]:
    if limits is None:
        return {}
    names = [name for name in dir(limits) if not name.startswith("_")]
    return {name: getattr(limits, name) for name in names}


def _check_texts(tokenizer: Tokenizer, tokens: LLTokenizer, ids: list[int]) -> None:
    """Raises RequestError: the library reads a token as another text than the tokenizer writes."""
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    step = max(1, len(ids) // _NUM_CHECKED)
    for token_id in [i for i in ids if i not in special][::step]:
        written = tokenizer.decode([token_id], skip_special_tokens=False)
        read = tokens.decode_str([token_id])
        # decoders may leave out the space before a text
        is_part = "\N{REPLACEMENT CHARACTER}" in written + read
        if not is_part and written.strip(" ") != read.strip(" "):
            raise not_understood(f"token {token_id} is {written!r}, read as {read!r}")
