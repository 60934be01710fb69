"""Cache of measurements on a GPU, for later loads of an engine.

Measuring takes seconds, and gives the same for the same GPU, software and shapes. Results are in
specc's cache, keyed by the GPU, and not in the engine's directory, which may be read-only or shared
between machines. Whatever is missing there, or is of another version of torch, Triton or the
kernels, is measured. An unreadable or unwritable cache is only a warning.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from specc.runtime.backends.cuda.choose_products import choice_of
from specc.runtime.backends.cuda.product_candidates import (
    Candidate,
    ProductWarning,
    early_candidates,
)
from specc.system.file_cache import FileCache
from specc.system.kept_file import KeptFile

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Conditions:
    """Cache key of results, besides shapes.

    Args:
        torch_version: which implies that of cuBLAS.
        compiler: name and version of the kernels' compiler.
        kernels: digest of the kernels' source.
    """

    gpu: str
    torch_version: str
    compiler: str
    kernels: str

    @classmethod
    def of(cls, device: torch.device) -> Conditions:
        """Conditions of a GPU of this process."""
        from specc.kernels.cuda import few_rows

        name = torch.cuda.get_device_name(device)
        return cls(name, torch.__version__, few_rows.COMPILER, kernel_digest())

    @property
    def file_name(self) -> str:
        """Path in the cache: the GPU's name, then a digest of everything."""
        text = json.dumps([SCHEMA_VERSION, *astuple(self)])
        digest = hashlib.sha256(text.encode()).hexdigest()[:24]
        return f"products/{re.sub('[^A-Za-z0-9]+', '-', self.gpu)[:60]}-{digest}.json"


def kernel_digest() -> str:
    """Digest of the source of all Triton kernels."""
    spec = importlib.util.find_spec("specc.kernels.cuda")
    assert spec is not None
    assert spec.origin is not None
    digest = hashlib.sha256()
    for path in sorted(Path(spec.origin).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


class KeptProducts:
    """Cached results of `choose_products`.

    Args:
        cache: None is the user's.
        can_depend: launches may be dependent: results without dependent launches are not used.
    """

    def __init__(
        self, conditions: Conditions, cache: FileCache | None = None, can_depend: bool = False
    ) -> None:
        self._file = KeptFile(conditions.file_name, "products", _warn, cache)
        self.can_depend = can_depend

    def take(self) -> int:
        """Apply cached choices to products that this process has not measured.

        Returns:
            Number of products chosen.
        """
        from specc.kernels.cuda import few_rows

        count = 0
        for product, choice in self._choices():
            if product not in few_rows.choices:
                few_rows.choices[product] = choice
                count += 1
        return count

    def add(self, report: Iterable[Mapping[str, Any]]) -> None:
        """Store measurements; an unwritable cache is a warning.

        Args:
            report: see `choose_products`. Products with a failed candidate are not stored, so that
                the next load retries it, unless it has broken the device.
        """
        found = [dict(item) for item in report if _is_whole(item)]
        if not found:
            return
        # merge with what other processes have written; measurements of this one win
        kept = {_key(item): item for item in (*self._read(), *found)}
        self._file.write({"schema_version": SCHEMA_VERSION, "products": list(kept.values())})

    def _read(self) -> list[dict[str, Any]]:
        content = self._file.read()
        return [] if content is None else list(content["products"])

    def _choices(self) -> Iterator[tuple[Any, Any]]:
        """Products, and their choices among existing tiles."""
        for item in self._read():
            product = _product(item)
            best = Candidate.named(item["chosen"])
            dependent = Candidate.named(item["dependent"]) if "dependent" in item else None
            if dependent is None and self.can_depend and product.can_start_early:
                continue
            numbers = [candidate.number for candidate in (best, dependent) if candidate]
            if all(number is None or number < len(product.tiles) for number in numbers):
                yield product, choice_of(product, best, dependent)


class KeptLaunches:
    """Cached results of `choose_launches`, for one GPU and engine.

    Args:
        engine: digest of its programs; other engines may gain from other launches.
        cache: None is the user's.
    """

    def __init__(self, conditions: Conditions, engine: str, cache: FileCache | None = None) -> None:
        name = conditions.file_name.replace("products/", "launches/", 1)
        self._file = KeptFile(name, "dependent launches", _warn, cache)
        self._engine = engine

    def get(self, plan: str) -> dict[str, Any] | None:
        """Cached result of a plan, or None."""
        found = self._read().get(self._engine, {}).get(plan)
        return None if found is None else dict(found)

    def add(self, plan: str, item: dict[str, Any]) -> None:
        """Store a result; an unwritable cache is a warning."""
        kept = self._read()
        kept.setdefault(self._engine, {})[plan] = item
        self._file.write(kept)

    def _read(self) -> dict[str, dict[str, Any]]:
        return dict(self._file.read() or {})


def _warn(text: str) -> None:
    warnings.warn(text, ProductWarning, stacklevel=6)


def _is_whole(item: Mapping[str, Any]) -> bool:
    """Whether every candidate was timed, or can never be."""
    found = {Candidate.named(name): ms for name, ms in item["ms"].items()}
    if "lost" in item:
        return True
    ordinary = [candidate for candidate in found if not candidate.is_early]
    early = early_candidates(found) if "dependent" in item else []
    return len(ordinary) == 1 + len(_product(item).tiles) and set(early) <= found.keys()


def _product(item: Mapping[str, Any]) -> Any:
    from specc.kernels.cuda.few_rows import Product

    shape = (item["shape"][0], item["shape"][1])
    dtype = getattr(torch, item["dtype"])
    return Product(item["operator"], dtype, shape, item["rows"], item.get("layout", ""))


def _key(item: Mapping[str, Any]) -> tuple[Any, ...]:
    return item["operator"], item["dtype"], *item["shape"], item["rows"], item.get("layout", "")
