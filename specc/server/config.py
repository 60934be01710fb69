"""Options of the HTTP server, and the limits that it holds requests to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specc.close_name import advice
from specc.errors import ConfigError
from specc.option import check_ranges, object_of, option
from specc.server.admin_options import Admin
from specc.server.origin_options import Origins
from specc.server.parsers.names import REASONING_PARSERS, TOOL_CALL_PARSERS, agreed_parsers

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
# strings that may end an output, and their characters together: each is looked for at every token
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 16, 1024
MAX_STOP_TOKEN_IDS = 256
# outputs of one HTTP request: prompts times n
MAX_CHOICES = 128
# levels of lists and objects in a body, and how many of what takes time to parse it holds
MAX_DEPTH, MAX_VALUES, MAX_FIELDS, MAX_CONTAINERS = 64, 1 << 20, 1 << 15, 1 << 14


@dataclass(frozen=True)
class ConnectionLimits:
    """What connections may take.

    Args:
        max_connections: at a time.
        head_timeout_s: seconds for a request's headers, from the connection or their first byte.
        keep_alive_s: seconds that a connection waits for a further request.
        rest_timeout_s: seconds for the rest of a body that was answered before it was there.
        unread_timeout_s: seconds for which a client may read nothing of what is there for it.
        look_every_s: seconds between two looks for connections that are late.
    Raises:
        ConfigError: a value is outside its range.
    """

    max_connections: int = option(
        4096,
        "Open at a time. Beyond, the one that has sent no request for the longest time is closed;"
        " where all of them work, new ones get 503.",
        least=1,
    )
    head_timeout_s: float = 10.0
    keep_alive_s: float = 75.0
    rest_timeout_s: float = 10.0
    unread_timeout_s: float = 60.0
    look_every_s: float = 0.5

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Tls:
    """Files that connections are encrypted with, in PEM, as uvicorn and vLLM call them.

    Without any, connections are plain; what they hold is checked by `tls.make_context`.

    Raises:
        ConfigError: a value is outside its range.
    """

    ssl_keyfile: Path | None = option(
        None, "Private key of --ssl-certfile, unless that file has it.", metavar="FILE"
    )
    ssl_certfile: Path | None = option(
        None,
        "The server's certificate, and those that lead from it to a root: serve HTTPS.",
        metavar="FILE",
    )
    ssl_ca_certs: Path | None = option(
        None, "Authorities that clients' certificates are checked with.", metavar="FILE"
    )
    ssl_cert_reqs: int = option(
        0,
        "Client certificates: 0, none is asked for; 1, one that is shown has to be valid; 2, every"
        " client needs one.",
        least=0,
        most=2,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Place:
    """Where to listen, to whom, and how to stop.

    Args:
        allowed_hosts: names beside those of the machine; see `choose_hosts`.
        default_chat_template_kwargs: variables of templates, or their JSON; those of a chat go
            before them.
        tls: files that they are encrypted with.
    Raises:
        ConfigError: a value is outside its range.
    """

    host: str = option("127.0.0.1", "Address to listen at; 0.0.0.0 is all of them.")
    port: int = option(8000, "0 chooses one that is free.")
    drain_timeout_s: float = option(
        30.0, "Seconds that open requests have after SIGTERM.", "--drain-timeout", least=0
    )
    log_level: str = option("info", "critical, error, warning, info or debug.")
    chat_template: Path | None = option(
        None,
        "Jinja file to use instead of the engine's own; or the name of one of several.",
        metavar="FILE",
    )
    chat_template_content_format: str = option(
        "auto",
        "What templates get as content: string; openai, a list of parts; auto, what they read.",
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        "Variables of chat templates for chats that do not say otherwise, such as"
        " '{\"enable_thinking\": false}'.",
        type=str,
        metavar="JSON",
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "A name that clients may call this server, beside its addresses; repeatable, * is any."
        " Without it: the machine's own names where the server listens at a local address and"
        " needs no key, else any.",
        "--allowed-host",
    )
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    tls: Tls = field(default_factory=Tls)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(
                f"log_level={self.log_level!r}",
                f"one of {', '.join(LOG_LEVELS)}",
                advice(self.log_level, LOG_LEVELS, "choose one of them"),
            )
        name = "default_chat_template_kwargs"
        kwargs = object_of(self.default_chat_template_kwargs, name, '{"enable_thinking": false}')
        object.__setattr__(self, name, kwargs)


@dataclass(frozen=True)
class ServeConfig:
    """How an engine is served.

    Args:
        model_names: what clients call the model; the first one is in the responses. None is for
            `serve`, which takes the engine's directory.
        api_keys: one of them is needed under /v1; none for an open server.
        max_unbounded_bytes: of a prompt, of those that the tokenizer may leave out or put together
            without end, so that their number says nothing about tokens; None follows from the
            engine's max_seq_len.
        max_grammar_chars: of a grammar, schema or regex, or all choices together; what a request
            asks its output to be costs memory and time, tens of times as much as its text.
        max_stored_responses, max_stored_bytes: of /v1/responses, until they are forgotten; beyond,
            the caller who takes most of them loses the one that was not used for the longest time.
        body_timeout_s: seconds between two parts of a body; all of it has as long, and a second
            more for each KiB that comes.
        request_timeout_s: seconds after which a request ends with what it has; None is never.
        log_every_s: seconds between two lines of figures, while there is work; 0 logs none.
        reasoning_parser: what tells thinking from content; None leaves it there.
        enable_prompt_tokens_details: answers tell how much of a prompt was in the cache; None where
            there is one key at most, as others' prompts can be guessed from it.
        enable_spec_metrics: answers tell what was accepted of drafts, if asked; likewise.
        enable_auto_tool_choice: models may call the tools of a request where they want to.
        tool_call_parser: what tells such calls from content.
        trust_request_chat_template: chats may bring a template of their own: a program, which runs
            bounded as the engine's does, and which says what stands in the prompt.
        strict_fields: refuse fields that no request has, which are otherwise left out and logged.
        enable_request_id_headers: every response has a header `X-Request-Id`, also those that
            generate nothing.
        vllm_metrics: /metrics has figures by vLLM's names, too.
        allowed_hosts: names that requests may call this server, beside addresses; None allows any.
        origins: whose pages may use it.
        admin: who may put new weights into drafts, and let the engine sleep.
    Raises:
        ConfigError: a value is outside its range.
    """

    model_names: tuple[str, ...] = option(
        (),
        "What clients call it; repeatable. Else the directory.",
        "--served-model-name",
    )
    api_keys: tuple[str, ...] = option(
        (),
        "Needed under /v1; repeatable. Better in the environment: others see arguments.",
        "--api-key",
        env="SPECC_API_KEY",
    )
    max_body_bytes: int = option(8 << 20, "Of one request; larger ones get 413.", least=1)
    max_unbounded_bytes: int | None = option(
        None,
        "Most bytes of a prompt whose number says nothing about its tokens, as the tokenizer may"
        " leave them out. By default 64 for each position, and at least 1 MiB.",
        shows_default=False,
        least=0,
    )
    max_grammar_chars: int = option(
        256 << 10,
        "Of a grammar, schema or regex, or all choices of a request together.",
        least=1,
    )
    max_stored_responses: int = option(
        1024,
        "Responses of /v1/responses that are kept in memory for later requests; 0: none.",
        least=0,
    )
    max_stored_bytes: int = option(
        64 << 20, "Of all of them together; the longest unused one goes first.", least=0
    )
    body_timeout_s: float = 30.0
    request_timeout_s: float | None = option(
        None,
        "Seconds after which a request ends with what it has; else never.",
        "--request-timeout",
        shows_default=False,
        above=0,
    )
    log_every_s: float = option(
        10.0, "Seconds between two lines of figures; 0: none.", "--log-every", least=0
    )
    enable_prompt_tokens_details: bool | None = option(
        None,
        "Tell in usage how many tokens of a prompt were in the cache, which says something about"
        " other callers' prompts. By default with one API key at most.",
        "--enable-prompt-tokens-details/--no-enable-prompt-tokens-details",
        shows_default=False,
    )
    enable_spec_metrics: bool | None = option(
        None,
        "Tell what was accepted of the drafts of a request that asks (return_spec_metrics), which"
        " says something about other callers' outputs. By default with one API key at most.",
        "--enable-spec-metrics/--no-enable-spec-metrics",
        shows_default=False,
    )
    reasoning_parser: str | None = option(
        None,
        f"How the model marks its thinking: {', '.join(REASONING_PARSERS)}. Else it is content.",
        shows_default=False,
        metavar="NAME",
    )
    enable_auto_tool_choice: bool = option(
        False, "Look for calls of tools in chats that have any; needs --tool-call-parser."
    )
    tool_call_parser: str | None = option(
        None,
        f"How the model writes calls of tools: {', '.join(TOOL_CALL_PARSERS)}.",
        shows_default=False,
        metavar="NAME",
    )
    trust_request_chat_template: bool = option(
        False, "Render the chat templates that requests bring; names of the engine's own need none."
    )
    strict_fields: bool = option(
        False,
        "Refuse requests with fields that the API has not got, such as a misspelt one; else they"
        " are left out, and each name is logged once.",
        "--strict-fields",
    )
    enable_request_id_headers: bool = option(
        False,
        "Every response has the X-Request-Id of its request, or one of its own; else only those"
        " of completions and chats.",
        "--enable-request-id-headers",
    )
    vllm_metrics: bool = option(
        True,
        "Have figures at /metrics by vLLM's names (vllm:…), too, for its dashboards.",
        "--vllm-metrics/--no-vllm-metrics",
    )
    allowed_hosts: tuple[str, ...] | None = None
    origins: Origins = field(default_factory=Origins)
    admin: Admin = field(default_factory=Admin)

    def __post_init__(self) -> None:
        check_ranges(self)
        _, thinks = agreed_parsers(self.tool_call_parser, self.reasoning_parser)
        object.__setattr__(self, "reasoning_parser", thinks)
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError(
                "enable_auto_tool_choice without tool_call_parser",
                f"the format of the model's calls: {', '.join(TOOL_CALL_PARSERS)}",
                "set tool_call_parser (--tool-call-parser)",
            )
        if not all(self.model_names):
            raise ConfigError(
                f"model names {self.model_names!r}", "none that is empty", "correct the option"
            )
        # the value itself is a secret
        if not all(key and key.isascii() and key.isprintable() for key in self.api_keys):
            raise ConfigError(
                "an API key that is empty or not of printable ASCII characters",
                "keys that a header can hold",
                "choose another one",
            )

    @property
    def tells_cached_tokens(self) -> bool:
        return self._tells(self.enable_prompt_tokens_details)

    @property
    def tells_acceptance(self) -> bool:
        return self._tells(self.enable_spec_metrics)

    def _tells(self, wanted: bool | None) -> bool:
        """Whether answers say what depends on others' texts: with one key, there are no others."""
        return len(set(self.api_keys)) < 2 if wanted is None else wanted
