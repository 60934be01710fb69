"""Backends by name: each is imported when an engine first needs it."""

from __future__ import annotations

import importlib

from specc.artifact.backends import facts_of
from specc.errors import ConfigError
from specc.runtime.backends.base import RuntimeBackend

_registered: dict[str, RuntimeBackend] = {}


def register(name: str, backend: RuntimeBackend) -> None:
    """Let engines of this name be loaded by a backend that is no package of this folder.

    Args:
        name: whose facts are registered, see `specc.artifact.backends.register`.
    Raises:
        ConfigError: no facts have this name, or a second backend.
    """
    facts_of(name)
    if name in _registered:
        raise ConfigError(f"a second backend {name}", "a name of its own", "rename it")
    _registered[name] = backend


def backend_of(name: str) -> RuntimeBackend:
    """The backend of a known name.

    Raises:
        ConfigError: no backend has this name.
    """
    facts_of(name)
    if name not in _registered:
        module = importlib.import_module(f"specc.runtime.backends.{name}.backend")
        _registered[name] = module.BACKEND
    return _registered[name]
