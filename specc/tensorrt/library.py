"""TensorRT, whichever is installed: full TensorRT or TensorRT-RTX, imported when asked for.

Both have one Python API, so that the rest of specc says `trt = load()`. What differs is here: which
GPUs the builder can target, whether it needs one, and what it keeps from build to build.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from specc.errors import TensorRTError
from specc.system.extras import install_command

ENV = "SPECC_TENSORRT"
# in the order in which they are looked for
NAMES = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}
# the oldest versions whose parser knows the operator: of full TensorRT, and of TensorRT-RTX (there
# the oldest that was tried)
OPERATORS = {
    "Attention": ("10.15", "1.4"),
    "TensorScatter": ("10.15", "1.4"),
    "TRT_Attention": ("11.0", "1.7"),
    "TRT_KVCacheUpdate": ("11.0", "1.7"),
}
# below it there are no fused attention kernels
_OLDEST_CAPABILITY = 80
# below it TensorRT builds nothing that has e4m3 in it, weights of products included
_OLDEST_FP8 = "8.9"


@dataclass(frozen=True)
class TensorRTFacts:
    """What is installed.

    Args:
        name: module, `tensorrt` or `tensorrt_rtx`.
        version: as the module gives it.
        builds_without_gpu: the builder runs on a machine that has no driver.
        has_timing_cache: measurements are kept from build to build; TensorRT-RTX takes none.
        compute_capabilities: those that can be asked for, `8.9`; empty where the builder builds for
            the GPU that it finds.
    """

    name: str
    version: str
    builds_without_gpu: bool
    has_timing_cache: bool
    compute_capabilities: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{NAMES[self.name]} {self.version}"


def load() -> ModuleType:
    """Import full TensorRT, else TensorRT-RTX; the variable SPECC_TENSORRT names one of them.

    Raises:
        TensorRTError: none is installed with its libraries, or the variable names something else.
    """
    return _load(os.environ.get(ENV, ""))


@functools.cache
def _load(wanted: str) -> ModuleType:
    if wanted and wanted not in NAMES:
        raise TensorRTError(
            f"{ENV}={wanted}", " or ".join(f"{ENV}={name}" for name in NAMES), f"unset {ENV}"
        )
    tried = []
    for name in [wanted] if wanted else NAMES:
        try:
            module = importlib.import_module(name)
            # bindings without their libraries import on some versions and fail at the first use
            module.Builder  # noqa: B018
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            tried.append(f"{name} ({str(error).splitlines()[0] if str(error) else 'broken'})")
        else:
            return module
    raise TensorRTError(
        f"no TensorRT that can be imported: {'; '.join(tried)}",
        "TensorRT with its libraries, or TensorRT-RTX",
        f"{install_command('tensorrt')} (TensorRT-RTX), or install TensorRT as its vendor says",
    )


def facts() -> TensorRTFacts:
    """Raises TensorRTError: see `load`."""
    trt = load()
    name = trt.__name__
    members = getattr(getattr(trt, "ComputeCapability", None), "__members__", {})
    numbers = sorted(int(key[2:]) for key in members if re.fullmatch(r"SM\d+", key))
    targets = tuple(f"{n // 10}.{n % 10}" for n in numbers if n >= _OLDEST_CAPABILITY)
    is_rtx = name == "tensorrt_rtx"
    return TensorRTFacts(name, str(trt.__version__), is_rtx, not is_rtx, targets)


def require_operators(parser: Any, operators: set[str]) -> None:
    """Refuse a parser that lacks an operator, by asking it.

    Raises:
        TensorRTError: the installed version is too old.
    """
    missing = sorted(name for name in operators if not parser.supports_operator(name))
    if not missing:
        return
    known = [OPERATORS[name] for name in missing if name in OPERATORS]
    if not known:
        raise TensorRTError(
            f"{facts().title} has no operator {', '.join(missing)}",
            "operators that its ONNX parser knows",
            "compile for another backend (--backend), or with a newer TensorRT",
        )
    full, rtx = (max(versions, key=_version_key) for versions in zip(*known, strict=True))
    raise TensorRTError(
        f"{facts().title} has no operator {', '.join(missing)}",
        f"TensorRT {full} or newer, or TensorRT-RTX {rtx} or newer",
        "install a newer version",
    )


def parse_compute_capability(text: str) -> str:
    """`8.9`, `sm_89` or `SM89` → `8.9`.

    Raises:
        TensorRTError: no compute capability, or one that the installed builder cannot target.
    """
    match = re.fullmatch(r"(?:sm_?)?(\d+)\.?(\d)", text.strip(), re.IGNORECASE)
    installed = facts()
    choices = ", ".join(installed.compute_capabilities)
    if not match:
        raise TensorRTError(
            f"compute capability {text!r}",
            f"one of {choices}" if choices else "one such as 8.9",
            "give major.minor, as in --compute-capability 8.9",
        )
    wanted = f"{int(match[1])}.{match[2]}"
    if wanted in installed.compute_capabilities:
        return wanted
    if not installed.compute_capabilities:
        return _own_capability(wanted, installed)
    raise TensorRTError(
        f"compute capability {wanted} with {installed.title}",
        f"one that it builds for: {choices}",
        f"choose one of those, or build with full TensorRT ({ENV}=tensorrt) on a machine with "
        f"such a GPU, or use --backend cuda there",
    )


def require_fp8(capability: str | None) -> None:
    """Refuse weights in fp8 for GPUs that have no such type.

    Args:
        capability: as asked; None leaves it to the builder.
    Raises:
        TensorRTError: an older GPU, or no compute capability.
    """
    if capability is None:
        return
    wanted = parse_compute_capability(capability)
    if _version_key(wanted) < _version_key(_OLDEST_FP8):
        raise TensorRTError(
            f"weights in fp8 for compute capability {wanted}",
            f"{_OLDEST_FP8} or newer: TensorRT builds nothing with fp8 for older GPUs",
            "compile with --quantize int8 or int4, or for another --compute-capability",
        )


def _own_capability(wanted: str, installed: TensorRTFacts) -> str:
    import torch

    own = None
    if torch.cuda.is_available():
        own = "{}.{}".format(*torch.cuda.get_device_capability())
    if wanted != own:
        raise TensorRTError(
            f"compute capability {wanted} with {installed.title}, "
            + (f"on a GPU of {own}" if own else "on a machine without a GPU"),
            "the GPU that the engine is for: it is measured during the build",
            f"build there, or with TensorRT-RTX ({ENV}=tensorrt_rtx) for the GPUs it supports",
        )
    return wanted


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


class _Log:
    """TensorRT keeps the first logger of a process: this one, which passes lines on."""

    def __init__(self, trt: ModuleType) -> None:
        self.sink: Callable[[str, str], None] | None = None
        self.lock = threading.Lock()
        outer = self

        class Logger(trt.ILogger):  # type: ignore[name-defined, misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, msg: str) -> None:
                if outer.sink:
                    outer.sink(str(severity).rpartition(".")[2], msg)

        self.logger = Logger()


@functools.cache
def _log(name: str) -> _Log:
    return _Log(importlib.import_module(name))


def logger() -> Any:
    """The logger for every Builder and Runtime of this process."""
    return _log(load().__name__).logger


@contextmanager
def listening(sink: Callable[[str, str], None]) -> Iterator[None]:
    """Send what TensorRT says to `sink(severity, message)`, VERBOSE included.

    One listener at a time: others wait, since lines do not tell which build they belong to.
    """
    log = _log(load().__name__)
    with log.lock:
        log.sink = sink
        try:
            yield
        finally:
            log.sink = None
