"""Salts: requests share what others leave behind with those of the same salt alone."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from specc.errors import RequestError

MAX_CHARACTERS = 1024
_BYTES = 16
Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Salt:
    """Of one caller, or of one request.

    Args:
        key: which equal salts have in common.
        is_shared: other requests may have it.
    """

    key: bytes
    is_shared: bool = True

    @classmethod
    def of(cls, text: Any, index: int = 0) -> Salt | None:
        """What a caller passes as `cache_salt`; None where it is None.

        Args:
            text: of any language.
            index: which of the caller's prompts, for errors.
        Raises:
            RequestError: no text, an empty one, or a long one.
        """
        if text is None:
            return None
        is_text = isinstance(text, str)
        if not is_text or not 0 < len(text) <= MAX_CHARACTERS:
            found = f"of {len(text)} characters" if is_text else f"of type {type(text).__name__}"
            raise RequestError(
                f"prompt {index} with a cache_salt {found}",
                f"a text of 1 … {MAX_CHARACTERS} characters",
                "pass one that others cannot guess, or leave it out",
            )
        data = text.encode("utf-8", "surrogatepass")
        return cls(hashlib.blake2b(data, digest_size=_BYTES).digest())

    @classmethod
    def alone(cls) -> Salt:
        """One that no other request has."""
        return cls(secrets.token_bytes(_BYTES), is_shared=False)


def shares(salt: Salt | None) -> bool:
    """Whether a request with it may share anything with others."""
    return salt is None or salt.is_shared


class BySalt(Generic[Kept]):
    """Something that requests share, once for each salt, and once for all without one.

    Args:
        make: makes what a salt begins with; called with None for requests without one.
        most: salts that are kept, of which those that were asked for last stay.
    """

    def __init__(self, make: Callable[[Salt | None], Kept], most: int) -> None:
        self._make, self._most = make, most
        self._unsalted = make(None)
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()

    def of(self, salt: Salt | None) -> Kept:
        """What requests of a salt share; what none shares is made anew and not kept."""
        if salt is None:
            return self._unsalted
        if (found := self._kept.get(salt.key)) is None:
            found = self._make(salt)
            if not salt.is_shared:
                return found
            self._kept[salt.key] = found
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(salt.key)
        return found

    def __len__(self) -> int:
        """Salts that are kept."""
        return len(self._kept)
