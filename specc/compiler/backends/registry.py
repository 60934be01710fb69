"""Compiler backends by name: which one an engine gets, loaded when somebody asks for it."""

from __future__ import annotations

import importlib
import os

from specc.artifact.backends import backend_names, facts_of
from specc.close_name import advice, close_name
from specc.compile_request import CompileRequest
from specc.compiler.backends.base import CompilerBackend
from specc.config import CompileConfig
from specc.errors import ConfigError, SpeccError
from specc.refusals import refuse

_PACKAGE = "specc.compiler.backends"
_registered: dict[str, CompilerBackend] = {}
_VARIABLE = "SPECC_BACKEND"


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
    return None


def compiler_backend(name: str) -> CompilerBackend:
    """The backend of this name.

    Raises:
        ConfigError: there is none.
    """
    backend = find_backend(name)
    if backend is None:
        names = backend_names()
        do = advice(name, names, "choose one of them")
        raise ConfigError(f"backend {name!r}", f"one of {', '.join(names)}", do)
    return backend


def choose_backend(
    wanted: str | None, config: CompileConfig | None = None
) -> tuple[CompilerBackend, list[str]]:
    """The backend of an engine, and warnings.

    Args:
        wanted: by name; None asks the environment, then takes the first of those that are chosen
            by default and can compile here.
        config: options that one which is chosen by default has to take; None are those that every
            backend takes.
    Raises:
        ConfigError: no backend has this name.
        SpeccError: the one that is asked for cannot compile here.
    """
    name = wanted or os.environ.get(_VARIABLE) or None
    if name is None:
        return _default_backend(config)
    backend = find_backend(name)
    if backend is None:
        raise _unknown(name, "--backend " if wanted else f"{_VARIABLE}=")
    backend.check_machine()
    return backend, []


def _default_backend(config: CompileConfig | None) -> tuple[CompilerBackend, list[str]]:
    reasons: list[SpeccError] = []
    # a GPU first
    for name in sorted(backend_names(), key=lambda name: not facts_of(name).is_on_gpu):
        backend = compiler_backend(name)
        if not backend.is_default():
            continue
        try:
            backend.check_machine()
            # what the one of a GPU does not take, those of the processor may
            if config is not None and backend.facts.is_on_gpu:
                refuse(CompileRequest(config, backend=backend.facts, options=backend.options))
        except SpeccError as error:
            reasons.append(error)
        else:
            return backend, [backend.instead_of(error) for error in reasons]
    raise reasons[0]


def _unknown(name: str, option: str) -> ConfigError:
    names = backend_names()
    meant = next((known for known in names if name in compiler_backend(known).aliases), None)
    meant = meant or close_name(name, names)
    return ConfigError(
        f"{option}{name}",
        " or ".join(names),
        f"say {option}{meant}" if meant else "choose one of them, or leave it out",
    )
