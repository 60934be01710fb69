"""Options of the HTTP server, and the limits that it holds requests to."""

from __future__ import annotations

from dataclasses import dataclass

from specc.errors import ConfigError

# strings that may end an output, and their characters together: each is looked for at every token
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 16, 1024
MAX_STOP_TOKEN_IDS = 256
# outputs of one HTTP request: prompts times n
MAX_CHOICES = 128
# levels of lists and objects in a body, and how many of what takes time to parse it holds
MAX_DEPTH = 64
MAX_VALUES, MAX_FIELDS, MAX_CONTAINERS = 1 << 20, 1 << 15, 1 << 14


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

    max_connections: int = 4096
    head_timeout_s: float = 10.0
    keep_alive_s: float = 75.0
    rest_timeout_s: float = 10.0
    unread_timeout_s: float = 60.0
    look_every_s: float = 0.5

    def __post_init__(self) -> None:
        if self.max_connections < 1:
            raise ConfigError(
                f"max_connections={self.max_connections}", "1 or more", "correct the option"
            )


@dataclass(frozen=True)
class ServeConfig:
    """How an engine is served.

    Args:
        model_names: what clients call the model; the first one is in the responses.
        api_keys: one of them is needed under /v1; none for an open server.
        max_body_bytes: of a request.
        max_unbounded_bytes: of a prompt, of those that the tokenizer may leave out or put together
            without end, so that their number says nothing about tokens; None follows from the
            engine's max_seq_len.
        max_grammar_chars: of a grammar, schema or regex, or all choices together; what a request
            asks its output to be costs memory and time, tens of times as much as its text.
        body_timeout_s: seconds between two parts of a body; all of it has as long, and a second
            more for each KiB that comes.
        request_timeout_s: seconds after which a request ends with what it has; None is never.
        log_every_s: seconds between two lines of figures, while there is work; 0 logs none.
        allowed_hosts: names that requests may call this server, beside addresses; None allows any.
    Raises:
        ConfigError: a value is outside its range.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 8 << 20
    max_unbounded_bytes: int | None = None
    max_grammar_chars: int = 256 << 10
    body_timeout_s: float = 30.0
    request_timeout_s: float | None = None
    log_every_s: float = 10.0
    allowed_hosts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        do = "correct the option"
        if not self.model_names or not all(self.model_names):
            raise ConfigError(f"model names {self.model_names!r}", "at least one, none empty", do)
        # the value itself is a secret
        if not all(key and key.isascii() and key.isprintable() for key in self.api_keys):
            raise ConfigError(
                "an API key that is empty or not of printable ASCII characters",
                "keys that a header can hold",
                "choose another one",
            )
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes={self.max_body_bytes}", "1 or more", do)
        if self.max_unbounded_bytes is not None and self.max_unbounded_bytes < 0:
            raise ConfigError(f"max_unbounded_bytes={self.max_unbounded_bytes}", "0 or more", do)
        if self.max_grammar_chars < 1:
            raise ConfigError(f"max_grammar_chars={self.max_grammar_chars}", "1 or more", do)
        if self.request_timeout_s is not None and not self.request_timeout_s > 0:
            raise ConfigError(f"request_timeout={self.request_timeout_s}", "above 0", do)
        if not self.log_every_s >= 0:
            raise ConfigError(f"log_every={self.log_every_s}", "0 or more", do)
