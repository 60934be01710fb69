"""Engines whose rows have fewer bits: every plan has the tokens of off, and logits are as near."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specc.artifact.backends import facts_of
from specc.artifact.directory import read_manifest
from specc.artifact.graph_io import graph_from_json
from specc.artifact.manifest import Manifest
from specc.artifact.quantized_layout import QuantizedLayout
from specc.cli.render import weight_lines
from specc.compile_request import CompileRequest
from specc.compiler.build import build
from specc.compiler.compiled_model import check_used_bits
from specc.config import CompileConfig
from specc.errors import ConfigError, EngineError
from specc.kernels import ops
from specc.passes.program import bind_args
from specc.passes.quantize.quantize_linear import QuantizeLinear
from specc.passes.quantize.row_integers import RowIntegers
from specc.refusals import refuse
from specc.runtime.backends.program_files import read_json
from specc.runtime.engine import Engine
from specc.speculation.plans import SpecPlan
from tests import engines, models
from tests.passes.lower.cpu.test_linear import make_program
from tests.runtime.test_quantized import check_plans, error_of_logits, generate, reference_model

CHAIN, TREE = (SpecPlan.from_widths(widths) for widths in ((1, 1, 1, 1), (2, 2, 1)))
OWN, FP8 = (SpecPlan.from_widths((1, 1, 1), (f"self_{name}",)) for name in ("int8", "fp8"))
INT4: dict[str, Any] = {"quantize": "int4", "quantize_group": 32}
# least and largest of the largest error of logits over their spread, of rows of so many bits
BOUNDS = {8: (5e-3, 0.5), 16: (3e-5, 2e-3)}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory):
    """(checkpoint, engine) of a tiny model with a noisy draft."""
    known: dict[Any, tuple[Path, Path]] = {}

    def make_one(name: str = "llama", plans=(CHAIN, TREE), **options: Any) -> tuple[Path, Path]:
        key = (name, plans, *options.items())
        if key not in known:
            root = tmp_path_factory.mktemp("bits")
            target = models.save_tiny(name, root / "target")
            draft = models.save_tiny(name, root / "draft", 0, models.DRAFT_NOISE[name])
            given = {"backend": "eager", "probe": False} | options
            config = CompileConfig(max_seq_len=models.MAX_SEQ_LEN, plans=plans, **given)
            drafts = [draft] if any(plan.models for plan in plans) else []
            known[key] = target, engines.build(target, drafts, root / "engine", config)
        return known[key]

    return make_one


def bits_of_rows(program: Path) -> list[int]:
    """Of the products by integers of a program's file, in its order."""
    graph = graph_from_json(read_json(program / "program.json")["graph"]).graph
    names = {ops.linear_q, ops.grouped_mm_q}
    return [bind_args(node)["row_bits"] for node in graph.nodes if node.target in names]


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["eager", pytest.param("cpu", marks=pytest.mark.slow)])
def test_plans_and_logits(make, backend: str, bits: int) -> None:
    """Outputs are those of off; logits are as far off as so many bits make them."""
    checkpoint, engine = make(backend=backend, activation_bits=bits, **INT4)
    assert set(bits_of_rows(engine / "target")) == {bits}
    assert set(bits_of_rows(engine / "draft-0")) == {bits}
    error, _ = error_of_logits(engine, reference_model(checkpoint, engine), "float32")
    assert BOUNDS[bits][0] < error < BOUNDS[bits][1]
    check_plans(engine, (CHAIN, TREE))


@pytest.mark.slow
def test_compiled_and_eager_engines_say_the_same(make) -> None:
    _, compiled = make(backend="cpu", activation_bits=8, **INT4)
    loaded = [Engine.load(compiled, backend=name) for name in ("cpu", "eager")]
    tokens = [generate(engine, TREE.name, models.prompts()[:3])[0] for engine in loaded]
    assert tokens[0] == tokens[1]


# the default tier has their bits, those of experts among them, in
# tests/passes/quantize/test_row_integers.py
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mixtral", INT4),
        ("llama", {"dtype": "bfloat16", "quantize": "int8"}),
        ("llama", {"segments": True, **INT4}),
    ],
)
def test_other_products(make, name: str, options: dict[str, Any]) -> None:
    _, engine = make(name, activation_bits=8, **options)
    if "segments" not in options:
        assert set(bits_of_rows(engine / "target")) == {8}
    check_plans(engine, (CHAIN, TREE), num_prompts=2, max_tokens=12)


def test_a_draft_alone_has_them(make) -> None:
    """The target reads floats: its tokens are those of an engine without any integers."""
    _, plain = make(plans=(CHAIN,))
    _, engine = make(plans=(OWN,), activation_bits=8)
    assert bits_of_rows(engine / "target") == []
    (entry,) = read_manifest(engine).self_drafts
    assert set(bits_of_rows(engine / entry.dir)) == {8}
    prompts = models.prompts()[:3]
    found, stats = generate(Engine.load(engine), OWN.name, prompts)
    assert found == generate(Engine.load(plain), "off", prompts)[0]
    assert stats.mean_acceptance_length > 2


@pytest.mark.parametrize(
    ("is_told", "options"),
    [
        (True, INT4),
        (True, {"quantize": "int8"}),
        (False, INT4 | {"activation_bits": 8}),
        (False, INT4 | {"dtype": "bfloat16"}),
        (False, {"quantize": "fp8"}),
        (False, {}),
        (False, INT4 | {"plans": ()}),
    ],
)
def test_expensive_rows_are_told(is_told: bool, options: dict[str, Any], tmp_path: Path) -> None:
    """Where the passes of drafted tokens cost three products, compile says which option helps."""
    target = models.save_tiny("llama", tmp_path / "target")
    plan = SpecPlan.from_widths((1, 1), ("suffix",))
    given: dict[str, Any] = {"plans": (plan,), "backend": "cpu"} | options
    config = CompileConfig(max_seq_len=models.MAX_SEQ_LEN, probe=False, **given)
    told = [x for x in build(target, [], tmp_path / "engine", config).warnings if "24 bits" in x]
    assert len(told) == is_told
    assert all("--activation-bits 8" in text for text in told)


def test_what_is_told(make) -> None:
    _, engine = make(activation_bits=8, **INT4)
    manifest = read_manifest(engine)
    assert manifest.activation_bits == 8
    assert (
        weight_lines(manifest)[0] == "weights in int8 and int4 are multiplied with values of 8 bits"
    )
    data = manifest.to_json()
    assert Manifest.from_json(data) == manifest
    for wrong in (4, True, "8"):
        with pytest.raises(EngineError, match="activation_bits"):
            Manifest.from_json(data | {"activation_bits": wrong})
    _, without = make(**INT4)
    assert "activation_bits" not in read_manifest(without).to_json()
    assert set(bits_of_rows(without / "target")) == {0}


@pytest.mark.parametrize(
    ("options", "plans", "keeps_integers", "found"),
    [
        ({}, (CHAIN,), False, "--activation-bits 8 without weights in int8 or int4"),
        ({}, (FP8,), False, "--activation-bits 8 without weights in int8 or int4"),
        ({"quantize": "fp8"}, (CHAIN,), False, "--activation-bits 8 and --quantize fp8"),
        ({"quantize": "int8"}, (), False, None),
        ({}, (OWN,), False, None),
        ({}, (), True, None),
    ],
)
def test_where_they_would_change_nothing(options, plans, keeps_integers, found) -> None:
    schemes = {"target": "packed"} if keeps_integers else {}

    def ask() -> None:
        config = CompileConfig(activation_bits=8, **options)
        refuse(CompileRequest(config, plans, schemes=schemes, dtypes=("float32",)))

    if found is None:
        ask()
        return
    with pytest.raises(ConfigError) as caught:
        ask()
    assert caught.value.found == found


@pytest.mark.parametrize(
    ("dtype", "bits", "found"),
    [
        (
            "bfloat16",
            16,
            "--activation-bits 16, which changes no product of these models in bfloat16",
        ),
        ("bfloat16", 8, None),
        ("float32", 16, None),
    ],
)
def test_a_number_that_no_product_has(dtype: str, bits: int, found: str | None) -> None:
    x, w = torch.randn(3, 6).to(getattr(torch, dtype)), torch.randn(40, 6)
    program = make_program(x, w.to(x.dtype), is_packed=False)
    QuantizeLinear(QuantizedLayout(8)).run(program)
    RowIntegers(bits).run(program)
    config = CompileConfig(quantize="int8", activation_bits=bits, dtype=dtype)
    if found is None:
        check_used_bits(config, [program])
        return
    with pytest.raises(ConfigError) as caught:
        check_used_bits(config, [program])
    assert caught.value.found == found


@pytest.mark.parametrize("bits", [4, 24, True])
def test_numbers_of_bits_that_are_refused(bits) -> None:
    with pytest.raises(ConfigError) as caught:
        CompileConfig(activation_bits=bits)
    assert caught.value.needed == "8 or 16"


@pytest.mark.parametrize("backend", ["cuda", "onnx", "tensorrt"])
def test_backends_whose_rows_stay_floats(backend: str) -> None:
    config = CompileConfig(quantize="int8", activation_bits=8, backend=backend)
    with pytest.raises(ConfigError) as caught:
        refuse(CompileRequest(config, backend=facts_of(backend), options=facts_of(backend).options))
    assert f"with backend {backend}" in caught.value.found
