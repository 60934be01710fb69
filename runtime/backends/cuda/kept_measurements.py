"""What was measured on a GPU stays on the machine: the next load of an engine reads it.

Measuring takes seconds of every load, and gives the same for the same GPU, software and shapes. So
results lie in specc's cache, under the name of the GPU: an engine's directory may be read-only, and
may be used on several machines. What the cache does not have, or has from another version of
torch, of Triton or of the kernels, is measured. A cache that cannot be read or written is a
warning: an engine loads all the same, and measures.
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
    """What results hold for, besides shapes.

    Args:
        gpu: name of the device.
        torch_version: and with it that of the library.
        compiler: of the kernels, with its version.
        kernels: digest of the kernels' source.
    """

    gpu: str
    torch_version: str
    compiler: str
    kernels: str

    @classmethod
    def of(cls, device: torch.device) -> Conditions:
        """Those of a GPU of this process."""
        from specc.kernels.cuda import few_rows

        name = torch.cuda.get_device_name(device)
        return cls(name, torch.__version__, few_rows.COMPILER, kernel_digest())

    @property
    def file_name(self) -> str:
        """In the cache: the GPU's name for people, then a digest of everything."""
        text = json.dumps([SCHEMA_VERSION, *astuple(self)])
        digest = hashlib.sha256(text.encode()).hexdigest()[:24]
        return f"products/{re.sub('[^A-Za-z0-9]+', '-', self.gpu)[:60]}-{digest}.json"


def kernel_digest() -> str:
    """Of the source of all Triton kernels; a change in any of them measures anew."""
    spec = importlib.util.find_spec("specc.kernels.cuda")
    assert spec is not None
    assert spec.origin is not None
    digest = hashlib.sha256()
    for path in sorted(Path(spec.origin).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


class KeptProducts:
    """Results of `choose_products` in specc's cache.

    Args:
        conditions: under which they hold.
        cache: None is that of the user.
        can_depend: launches may be dependent: what was measured without them is not taken.
    """

    def __init__(
        self, conditions: Conditions, cache: FileCache | None = None, can_depend: bool = False
    ) -> None:
        self._file = KeptFile(conditions.file_name, "products", _warn, cache)
        self.can_depend = can_depend

    def take(self) -> int:
        """Choose as was measured earlier, what this process has not measured itself.

        Returns:
            number of products that were chosen.
        """
        from specc.kernels.cuda import few_rows

        count = 0
        for product, choice in self._choices():
            if product not in few_rows.choices:
                few_rows.choices[product] = choice
                count += 1
        return count

    def add(self, report: Iterable[Mapping[str, Any]]) -> None:
        """Keep what was measured; a cache that cannot be written is a warning.

        Args:
            report: as `choose_products` returns it. What has a candidate that failed is not kept:
                the next load tries it again; but not one that has ended the device's work.
        """
        found = [dict(item) for item in report if _is_whole(item)]
        if not found:
            return
        # another process may have written meanwhile; what this one has measured replaces that
        kept = {_key(item): item for item in (*self._read(), *found)}
        self._file.write({"schema_version": SCHEMA_VERSION, "products": list(kept.values())})

    def _read(self) -> list[dict[str, Any]]:
        content = self._file.read()
        return [] if content is None else list(content["products"])

    def _choices(self) -> Iterator[tuple[Any, Any]]:
        """Products, and what was chosen of tiles that there are."""
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
    """Results of `choose_launches` in specc's cache, for one GPU and one engine.

    Args:
        conditions: under which they hold.
        engine: digest of its programs; products and steps of another may gain from other launches.
        cache: None is that of the user.
    """

    def __init__(self, conditions: Conditions, engine: str, cache: FileCache | None = None) -> None:
        name = conditions.file_name.replace("products/", "launches/", 1)
        self._file = KeptFile(name, "dependent launches", _warn, cache)
        self._engine = engine

    def get(self, plan: str) -> dict[str, Any] | None:
        """What was found of a plan; None where that is not known."""
        found = self._read().get(self._engine, {}).get(plan)
        return None if found is None else dict(found)

    def add(self, plan: str, item: dict[str, Any]) -> None:
        """Keep what was found; a cache that cannot be written is a warning."""
        kept = self._read()
        kept.setdefault(self._engine, {})[plan] = item
        self._file.write(kept)

    def _read(self) -> dict[str, dict[str, Any]]:
        return dict(self._file.read() or {})


def _warn(text: str) -> None:
    warnings.warn(text, ProductWarning, stacklevel=6)


def _is_whole(item: Mapping[str, Any]) -> bool:
    """Whether every candidate was timed, or one of them can never be."""
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
