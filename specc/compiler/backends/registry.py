"""Compiler backends by name; a module is loaded when somebody asks for its backend."""

from __future__ import annotations

import importlib

from specc.artifact.backends import backend_names
from specc.compiler.backends.base import CompilerBackend
from specc.errors import ConfigError

_PACKAGE = "specc.compiler.backends"
# what no GPU has run has a name of its own, and stands in no list of what there is
_EXPERIMENTAL = {
    "aot-inductor": f"{_PACKAGE}.experimental.aot_inductor",
    "torch-tensorrt": f"{_PACKAGE}.experimental.torch_tensorrt",
}
_registered: dict[str, CompilerBackend] = {}


def register(backend: CompilerBackend) -> CompilerBackend:
    """Add a backend that has no module in this package; its facts are registered before.

    Raises:
        ConfigError: the name is taken, or nothing is known of it.
    """
    if backend.name not in backend_names():
        raise ConfigError(
            f"the backend {backend.name}, of which nothing is known",
            "its BackendFacts, in specc.artifact.backends",
            "register those first",
        )
    if backend.name in _registered:
        raise ConfigError(f"a second backend {backend.name}", "a name of its own", "rename it")
    _registered[backend.name] = backend
    return backend


def find_backend(name: str) -> CompilerBackend | None:
    """The backend of this name: registered, or `BACKEND` of the module that is called like it."""
    if name in _registered:
        return _registered[name]
    if name in backend_names():
        return importlib.import_module(f"{_PACKAGE}.{name}").BACKEND
    return importlib.import_module(_EXPERIMENTAL[name]).BACKEND if name in _EXPERIMENTAL else None


def compiler_backend(name: str) -> CompilerBackend:
    """The backend of this name.

    Raises:
        ConfigError: there is none.
    """
    backend = find_backend(name)
    if backend is None:
        names = ", ".join(backend_names())
        raise ConfigError(f"backend {name!r}", f"one of {names}", "choose one of them")
    return backend
