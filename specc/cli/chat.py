"""`specc chat`: a conversation with an engine in the terminal, or line by line from a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.cli.limit import Limit
from specc.cli.prompts import decode
from specc.errors import ConfigError, EngineError, RequestError
from specc.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specc.runtime.engine_args import EngineArgs
    from specc.runtime.llm import LLM
    from specc.runtime.requests.chat_template import ChatTemplate

_PROMPT = "> "
_HELP = "/reset forgets the conversation, /exit or Ctrl-D ends the chat, Ctrl-C stops an answer"


@dataclass
class Conversation:
    """Messages, and the engine that answers the last of them.

    Rows of earlier turns are shared: the engine reads only what is new of a conversation.

    Args:
        llm: whose tokenizer and context hold.
        sampling: options of `SamplingParams`.
        system: message that comes first, always.
        max_tokens: of an answer; None is as the checkpoint says, else as many as the context has
            room for.
    """

    llm: LLM
    template: ChatTemplate
    sampling: Mapping[str, Any]
    system: str | None = None
    max_tokens: int | None = None
    turns: list[dict[str, str]] = field(default_factory=list)
    # of the last answer
    finish_reason: str | None = None
    num_dropped: int = 0
    # why it ends, where it does not by itself and that was not asked for
    cut: str = ""

    def answer(self, text: str) -> Generator[str, None, None]:
        """Pieces of the answer as they come; what came of it stays in the conversation.

        Raises:
            RequestError: a message that the template refuses, or one longer than the context; it
                is not part of the conversation then.
        """
        self.turns.append({"role": "user", "content": text})
        try:
            token_ids = self._fit()
        except BaseException:
            self.turns.pop()
            raise
        room = self.llm.engine.max_seq_len - len(token_ids)
        options = {**self.llm.default_options, **self.sampling}
        is_asked = self.max_tokens is not None
        most = self.max_tokens if is_asked else options.get("max_tokens")
        limit = Limit(most, is_asked, self.llm.engine.max_seq_len)
        params = SamplingParams(**{**options, "max_tokens": min(most or room, room)})
        said: list[str] = []
        self.finish_reason, self.cut = None, ""
        try:
            events = self.llm.stream([token_ids], params)
            with contextlib.closing(events):  # type: ignore[type-var]
                for event in events:
                    said.append(event.text)
                    if event.finished:
                        self.finish_reason = event.finish_reason
                        if event.finish_reason == "length":
                            self.cut = limit.reason(len(said))
                    yield event.text
        finally:
            self.turns.append({"role": "assistant", "content": "".join(said)})

    def reset(self) -> None:
        """Forget all but the system message."""
        self.turns.clear()

    def _fit(self) -> list[int]:
        """Token ids of the prompt; the oldest turns are left out where there is no room."""
        kept, self.num_dropped = list(self.turns), 0
        try:
            return self._fitted()
        except BaseException:
            # what is refused costs the conversation nothing
            self.turns, self.num_dropped = kept, 0
            raise

    def _fitted(self) -> list[int]:
        most = self.llm.engine.max_seq_len - 1
        while len(token_ids := self.token_ids()) > most:
            if len(self.turns) < 3:
                raise RequestError(
                    f"a message that makes a prompt of {len(token_ids)} tokens",
                    f"at most {most}: the engine's max_seq_len is {most + 1}",
                    "shorten it, or compile with a larger --max-seq-len",
                )
            # a question and its answer
            del self.turns[:2]
            self.num_dropped += 1
        return token_ids

    def token_ids(self) -> list[int]:
        """Of all turns, as the template renders them."""
        from specc.runtime.requests.request_maker import RequestMaker

        messages: list[dict[str, str]] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        text = self.template.render([*messages, *self.turns])
        return RequestMaker(self.llm.engine, None).tokenize(text, has_special_tokens=True)


def run_chat(
    args: EngineArgs,
    sampling: Mapping[str, Any],
    *,
    system: str | None,
    max_tokens: int | None,
    template: Path | None,
    stats: bool,
) -> None:
    """Talk until the input ends.

    Raises:
        SpeccError: of the engine, of an option; the engine has no template or no tokenizer.
    """
    SamplingParams(max_tokens=1 if max_tokens is None else max_tokens, **sampling)
    from specc.runtime.llm import LLM
    from specc.runtime.requests.chat_template import load_template

    found = load_template(args.directory, template)
    if found is None:
        raise ConfigError(
            f"{args.engine}, which has no chat template",
            "an engine of a model that was trained on conversations, or a template",
            "pass --chat-template FILE.jinja, or use specc run for plain text",
        )
    llm = LLM.from_engine_args(args)
    Limit(max_tokens, True, llm.engine.max_seq_len).check()
    if llm.tokenizer is None:
        raise EngineError(
            "an engine without a tokenizer", "one whose tokenizer reads text", "compile it with one"
        )
    conversation = Conversation(llm, found, sampling, system, max_tokens)
    talk(conversation)
    if stats:
        from specc.bench.plain_speed import measure_plain
        from specc.cli.render import print_stats

        metrics = llm.get_metrics()
        sequences = [conversation.token_ids()] if metrics.num_spec_steps else []
        print_stats(metrics, measure_plain(llm.engine, sequences, metrics))


def talk(conversation: Conversation) -> None:
    """Read messages and print answers, until the input ends."""
    if sys.stdin.isatty():
        _note(_HELP)
    for line in _lines():
        text = line.strip()
        if text in ("/exit", "/quit"):
            return
        if text == "/reset":
            conversation.reset()
            _note("the conversation is forgotten")
        elif text.startswith("/") and " " not in text:
            _note(f"no command {text}; {_HELP}")
        elif text:
            _print_answer(conversation, text)


def _lines() -> Iterator[str]:
    """Lines of the input; a terminal shows a prompt, and arrow keys edit."""
    if not sys.stdin.isatty():
        for line in sys.stdin.buffer:
            yield decode(line, "standard input")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            line = input(_PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            # as in Python's own prompt: what was typed is dropped
            print()
            continue
        yield line


def _print_answer(conversation: Conversation, text: str) -> None:
    try:
        with contextlib.closing(conversation.answer(text)) as pieces:
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
    except RequestError as error:
        # a conversation goes on after a message that was refused
        print(error, file=sys.stderr)
        return
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        conversation.finish_reason = "abort"
    sys.stdout.write("\n")
    sys.stdout.flush()
    if conversation.num_dropped:
        _note(f"{conversation.num_dropped} of the oldest turns no longer fit, and were left out")
    if conversation.cut:
        _note(f"the answer ends {conversation.cut}")


def _note(text: str) -> None:
    sys.stdout.flush()
    print(f"note: {text}", file=sys.stderr)
