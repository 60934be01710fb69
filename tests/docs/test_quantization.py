"""The tables of backends in docs/guide/quantization.md are what facts, kernels and builds say."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import torch

from specc.artifact.backends import backend_names, facts_of
from specc.artifact.quantized_layout import GROUPS, QuantizedLayout
from specc.errors import ConfigError
from specc.kernels.cuda.few_rows_tiles import QUANTIZED
from specc.passes.program import Weight
from specc.passes.rewrite.require_supported import RequireLayouts
from tests.passes.lower.tensorrt.test_dequantized import FLOATS, READ

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "quantization.md"


def lines() -> list[list[str]]:
    """Cells of the rows of tables in the part about backends."""
    part = PAGE.read_text(encoding="utf-8").partition("\n## Backends\n")[2].partition("\n## ")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in part.splitlines()
        if line.startswith("| `")
    ]


def test_the_table_of_backends() -> None:
    found = {
        name: kinds
        for names, kinds, *rest in lines()
        if len(rest) == 1
        for name in re.findall(r"`(\w+)`", names)
    }
    assert found == {
        name: ", ".join(facts_of(name).quantized) or "none" for name in backend_names()
    }


def test_the_table_of_layouts() -> None:
    found = {
        name: cells
        for names, *cells in lines()
        if len(cells) == 4
        for name in re.findall(r"`([\w-]+)`", names)
    }
    assert found == {name: expected(QuantizedLayout.named(name)) for name in every_layout()}


def every_layout() -> list[str]:
    made = [
        f"{kind}{group}{zeros}"
        for kind, groups in (("int8", ("", *GROUPS)), ("int4", GROUPS), ("fp8", ("", *GROUPS)))
        for group in (f"-g{size}" if size else "" for size in groups)
        for zeros in (("",) if kind == "fp8" else ("", "-zeros"))
    ]
    return [*made, "mxfp4", "nvfp4"]


def expected(layout: QuantizedLayout) -> list[str]:
    # rows by fp8 stay floats: specc.kernels.reference.quantized
    kept = "values" if layout.kind == "fp8" else "integers"
    return [
        kept if takes("cpu", layout) and takes("eager", layout) else "refused",
        "kernel" if layout.name in QUANTIZED else "floats",
        "levels" if takes("onnx", layout) else "refused",
        built(layout) if takes("tensorrt", layout) else "refused",
    ]


def takes(backend: str, layout: QuantizedLayout) -> bool:
    weight = Weight(("w",), torch.float32, (128, 128), quantized=layout)
    program = SimpleNamespace(name="target", weights={"w": weight})
    try:
        RequireLayouts(facts_of(backend)).run(program)  # type: ignore[arg-type]
    except ConfigError:
        return False
    return True


def built(layout: QuantizedLayout) -> str:
    """What builds of TensorRT-RTX have shown of layouts of this kind, in groups or not."""
    kind = {"int8": "INT8", "int4": "INT4", "fp8": "FLOAT8E4M3FN"}[layout.kind]
    shown = {True: "kernel", False: "floats"}
    (how,) = {
        shown[cases is READ]
        for cases in (READ, FLOATS)
        for levels, group in cases
        if levels == kind and bool(group) == bool(layout.group)
    }
    return how
