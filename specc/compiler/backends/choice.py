"""Which backend an engine gets: the one that is asked for, else what this machine can compile."""

from __future__ import annotations

import difflib
import os

from specc.artifact.backends import backend_names, facts_of
from specc.compiler.backends.base import CompilerBackend
from specc.compiler.backends.registry import compiler_backend, find_backend
from specc.config import BACKEND_OPTIONS, CompileConfig
from specc.errors import ConfigError, SpeccError

_VARIABLE = "SPECC_BACKEND"


def choose_backend(wanted: str | None) -> tuple[CompilerBackend, list[str]]:
    """The backend of an engine, and warnings.

    Args:
        wanted: by name; None asks the environment, then takes the first of those that are chosen
            by default and can compile here.
    Raises:
        ConfigError: no backend has this name.
        SpeccError: the one that is asked for cannot compile here.
    """
    name = wanted or os.environ.get(_VARIABLE) or None
    if name is None:
        return _default_backend()
    backend = find_backend(name)
    if backend is None:
        raise _unknown(name, "--backend " if wanted else f"{_VARIABLE}=")
    backend.check_machine()
    return backend, []


def check_options(config: CompileConfig, backend: CompilerBackend) -> None:
    """Refuse options that only other backends take.

    Raises:
        ConfigError: one of them is given.
    """
    for name, default in BACKEND_OPTIONS.items():
        if getattr(config, name) == default or name in backend.options:
            continue
        option = "--" + name.replace("_", "-")
        takers = [x for x in backend_names() if name in compiler_backend(x).options]
        raise ConfigError(
            f"{option} with backend {backend.name}",
            f"the backend {' or '.join(takers)}, which it is for",
            f"pass --backend {takers[0]}, or leave out {option}",
        )


def _default_backend() -> tuple[CompilerBackend, list[str]]:
    reasons: list[SpeccError] = []
    for name in backend_names():
        # never by itself: cuda until a GPU has shown it, and what is for other runtimes
        if not facts_of(name).by_default:
            continue
        backend = compiler_backend(name)
        try:
            backend.check_machine()
        except SpeccError as error:
            reasons.append(error)
        else:
            return backend, [backend.instead_of(error) for error in reasons]
    raise reasons[0]


def _unknown(name: str, option: str) -> ConfigError:
    names = backend_names()
    meant = next((known for known in names if name in compiler_backend(known).aliases), None)
    meant = meant or next(iter(difflib.get_close_matches(name, names, n=1)), None)
    return ConfigError(
        f"{option}{name}",
        " or ".join(names),
        f"say {option}{meant}" if meant else "choose one of them, or leave it out",
    )
