"""The arrows of the architecture: who may import whom, and what a deployed engine needs."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"specc": "specc", "passes": "specc.passes", "runtime": "specc.runtime"}
FOLDERS["kernels"] = "specc.kernels"

# specc/ is both the bottom and the top of the graph, so each of its files has its layer here
LAYER_OF_FILE = {
    "__init__": "facade",
    "api": "api",
    "artifact": "facts",
    "bench": "bench",
    "bench_bytes": "bench",
    "bench_compile": "compiler",
    "bench_device": "bench",
    "bench_engine": "bench",
    "bench_estimate": "bench",
    "bench_model": "facts",
    "bench_nodes": "bench",
    "bench_plot": "bench",
    "bench_report": "bench",
    "bench_shapes": "bench",
    "bench_shapes_engine": "bench",
    "bench_shapes_report": "bench",
    "bench_steps": "bench",
    "bench_synthetic": "bench",
    "bench_transformers": "bench",
    "bench_weights": "bench",
    "child_processes": "facts",
    "choose_plans": "facts",
    "cli": "cli",
    "cli_app": "cli",
    "cli_chat": "cli",
    "cli_command_bench": "cli",
    "cli_command_chat": "cli",
    "cli_command_compile": "cli",
    "cli_command_run": "cli",
    "cli_command_serve": "cli",
    "cli_command_triton": "cli",
    "cli_command_tune": "cli",
    "cli_pictures": "cli",
    "cli_bench": "cli",
    "cli_bench_estimate": "cli",
    "cli_bench_serve": "cli",
    "cli_bench_serve_options": "cli",
    "cli_bench_serve_table": "cli",
    "cli_bench_shapes": "cli",
    "cli_bench_shapes_table": "cli",
    "cli_bench_table": "cli",
    "cli_compile": "cli",
    "cli_doctor": "cli",
    "cli_doctor_extras": "cli",
    "cli_inspect": "cli",
    "cli_print_table": "cli",
    "cli_progress": "cli",
    "cli_prompts": "cli",
    "cli_render": "cli",
    "cli_run": "cli",
    "cli_serve": "cli",
    "cli_stats": "cli",
    "cli_synonyms": "cli",
    "cli_tensorrt": "cli",
    "cli_triton": "cli",
    "cli_tune": "cli",
    "compile_checks": "compiler",
    "compile_rectangular": "compiler",
    "compile_tensorrt": "compiler",
    "compile_tokenizer": "compiler",
    "compile_weights": "compiler",
    "compiler": "compiler",
    "config": "facts",
    "errors": "facts",
    "extend_engine": "compiler",
    "extras": "facts",
    "file_cache": "facts",
    "files": "facts",
    "graph_costs": "facts",
    "graph_io": "facts",
    "json_file": "facts",
    "latency_table": "facts",
    "load_acceptance": "bench",
    "load_arrivals": "bench",
    "load_figures": "bench",
    "load_goodput": "bench",
    "load_http": "bench",
    "load_http_client": "bench",
    "load_lengths": "bench",
    "load_overheads": "bench",
    "load_plot": "bench",
    "load_report": "bench",
    "load_request": "bench",
    "load_result": "bench",
    "load_run": "bench",
    "load_service_client": "bench",
    "load_simulated": "bench",
    "load_subject": "bench",
    "load_sweep": "bench",
    "load_trace": "bench",
    "logit_controls": "facts",
    "machine": "facts",
    "manifest": "facts",
    "manifest_decode": "facts",
    "measure_latency": "bench",
    "metrics": "facts",
    "nonfinite": "facts",
    "model_entries": "compiler",
    "picture": "bench",
    "owned_directory": "facts",
    "plan_acceptance": "facts",
    "plan_choice": "facts",
    "plan_seconds": "facts",
    "plan_tree": "facts",
    "plan_tree_dp": "facts",
    "plan_tree_heap": "facts",
    "plans": "facts",
    "progress": "facts",
    "rectangle": "facts",
    "roofline": "facts",
    "safetensors_io": "facts",
    "sampling_params": "facts",
    "sealed_copy": "facts",
    "sampling_rows": "facts",
    "safetensors_writer": "facts",
    "serve_answers": "serve",
    "serve_app": "serve",
    "serve_body": "serve",
    "serve_chat": "serve",
    "serve_config": "serve",
    "serve_connections": "serve",
    "serve_endpoints": "serve",
    "serve_errors": "serve",
    "serve_generate": "serve",
    "serve_grammar": "serve",
    "serve_grammar_size": "serve",
    "serve_hosts": "serve",
    "serve_http": "serve",
    "serve_latencies": "serve",
    "serve_listener": "serve",
    "serve_log": "serve",
    "serve_memory": "serve",
    "serve_logprobs": "serve",
    "serve_metrics": "serve",
    "serve_openapi": "serve",
    "serve_page": "serve",
    "serve_params": "serve",
    "serve_protocol": "serve",
    "serve_run": "serve",
    "serve_stream": "serve",
    "serve_work": "serve",
    "signals": "facts",
    "simulate": "bench",
    "simulate_load": "bench",
    "simulate_runner": "bench",
    "simulate_sweep": "bench",
    "step_items": "bench",
    "step_picture": "bench",
    "structured_params": "facts",
    "tokens": "facts",
    "tree": "facts",
    "tree_picture": "bench",
    "triton_repository": "facts",
    "triton_tensors": "facts",
    "trt": "facts",
    "trt_layers": "facts",
    "tune": "tune",
    "tune_acceptance": "bench",
    "tune_seconds": "bench",
    "unreplaced": "facts",
    "vllm_names": "facts",
    "weight_layout": "facts",
    "weights": "facts",
}
# layer → the layers that it may import; imports inside functions count as well
ARROWS = {
    "facts": {"facts"},
    "kernels": {"facts", "kernels"},
    "passes": {"facts", "kernels", "passes"},
    "runtime": {"facts", "kernels", "runtime"},
    "compiler": {"facts", "passes", "compiler"},
    "api": {"facts", "compiler", "runtime", "api"},
    "bench": {"facts", "kernels", "runtime", "bench"},
    "tune": {"facts", "compiler", "runtime", "bench"},
    "serve": {"facts", "runtime", "serve"},
    "cli": {"facts", "kernels", "compiler", "runtime", "api", "bench", "tune", "serve", "cli"},
    "facade": set(),
}
# layer → packages besides the standard library
PACKAGES = {
    "facts": {"torch", "safetensors", "tokenizers", "numpy"},
    "kernels": {"torch", "triton"},
    "passes": {
        *("torch", "transformers", "huggingface_hub", "tokenizers", "sympy"),
        *("onnx", "onnx_ir", "onnxscript", "torch_tensorrt"),
    },
    "runtime": {
        *("torch", "safetensors", "tokenizers", "onnx", "onnxruntime", "llguidance"),
        # tqdm only where a caller asks for its bar
        *("numpy", "jinja2", "tqdm"),
    },
    "compiler": {"torch", "tokenizers"},
    "api": {"torch"},
    "bench": {"torch", "transformers", "matplotlib", "networkx"},
    "tune": {"torch"},
    "serve": {
        *("fastapi", "starlette", "pydantic", "uvicorn", "h11", "prometheus_client"),
        *("tokenizers", "numpy"),
    },
    "cli": {"torch", "typer", "rich"},
    "facade": set(),
}
# passes see operators, their oracles and what builds the C++ ones, never a Triton kernel
KERNELS_FOR_PASSES = {
    *("specc.kernels", "specc.kernels.ops", "specc.kernels.reference"),
    *("specc.kernels.reference_fused", "specc.kernels.native"),
}
# but for the pass that puts launches in the place of operators: it traces what it imports
LAUNCHES_FOR = {
    "specc.passes.inline_kernels": {"specc.kernels.cuda.launch", "specc.kernels.cuda.register"},
}
# the command line answers --help before anything heavy loads: in these files everything but the
# standard library and the listed modules is imported inside functions
_COMMANDS = tuple(
    f"cli_command_{name}" for name in ("bench", "chat", "compile", "run", "serve", "triton", "tune")
)
LAZY = {
    "cli": {"typer", "specc.cli_app", *(f"specc.{name}" for name in _COMMANDS)},
    "cli_app": {"typer", "typer.core", "specc.cli_synonyms", "specc.errors"},
    "cli_synonyms": set(),
    **{name: {"typer", "specc.cli_app"} for name in _COMMANDS},
    "__init__": set(),
}
MAX_LINES = 450


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("**/*.py"))]


def module_of(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS[folder], *rest])


def layer_of(module: str) -> str:
    """Layer of a module, or of the package that it names."""
    parts = module.split(".")
    if len(parts) > 1 and parts[1] in ("passes", "runtime", "kernels"):
        return parts[1]
    return LAYER_OF_FILE[parts[1] if len(parts) > 1 else "__init__"]


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules that some code imports; `from specc.passes import x` yields the module x."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            for alias in node.names:
                name = f"{module}.{alias.name}"
                # the facade resolves names of every layer: what it is asked for counts
                yield name if is_module(name) or module == "specc" else module


def is_module(name: str) -> bool:
    for folder, package in sorted(FOLDERS.items(), key=lambda item: -len(item[1])):
        if name.startswith(f"{package}."):
            path = ROOT / folder / Path(*name.removeprefix(f"{package}.").split("."))
            return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
    return False


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_imports_follow_the_arrows(path):
    module = module_of(path)
    layer = layer_of(module)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if layer == "facade":  # names for type checkers only; the rest is resolved on access
        tree.body = [node for node in tree.body if not is_type_checking(node)]
    for name in imported(tree):
        top = name.split(".")[0]
        if top == "specc":
            if name == "specc.__version__":
                continue
            assert layer_of(name) in ARROWS[layer], f"{module} ({layer}) imports {name}"
            if layer == "passes" and layer_of(name) == "kernels":
                allowed = KERNELS_FOR_PASSES | LAUNCHES_FOR.get(module, set())
                assert name in allowed, f"{module} imports {name}"
        elif top not in sys.stdlib_module_names:
            assert top in PACKAGES[layer], f"{module} ({layer}) imports {name}"


def test_the_table_names_every_file():
    """A new file in specc/ states its layer here; a removed one leaves the table."""
    files = {path.stem for path in (ROOT / "specc").glob("*.py")}
    assert files == set(LAYER_OF_FILE)


@pytest.mark.parametrize("name", sorted(LAZY))
def test_heavy_imports_are_lazy(name):
    tree = ast.parse((ROOT / "specc" / f"{name}.py").read_text(encoding="utf-8"))
    top_level = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    found = {module for node in top_level for module in imported(node)}
    assert {x for x in found if x.split(".")[0] not in sys.stdlib_module_names} <= LAZY[name]


def test_the_arrows_catch_a_wrong_import():
    """The check itself: an import inside a function, of a submodule by its parent's name."""
    tree = ast.parse("def f():\n    from specc.passes import trace\n")
    assert list(imported(tree)) == ["specc.passes.trace"]
    assert layer_of("specc.passes.trace") not in ARROWS["runtime"]
    assert layer_of("specc.compiler") not in ARROWS["runtime"]
    assert "transformers" not in PACKAGES["runtime"]


@pytest.mark.parametrize("name", ["kernels", "passes", "runtime"])
def test_folders_have_no_bare_import_name(name):
    """Hugging Face publishes a package `kernels`, and transformers runs whatever it finds there."""
    spec = importlib.util.find_spec(name)
    assert spec is None or spec.origin is None or ROOT not in Path(spec.origin).parents


@pytest.mark.parametrize("name", ["kernels", "passes", "runtime"])
def test_package_files_have_no_side_effects(name):
    body = ast.parse((ROOT / name / "__init__.py").read_text(encoding="utf-8")).body
    assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body)


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_files_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


FORBIDDEN = (
    "transformers",
    "huggingface_hub",
    "typer",
    "rich",
    "click",
    "specc.passes",
    "specc.compiler",
    "specc.api",
    "specc.cli",
)

DEPLOYED = """
import json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if any(name == x or name.startswith(x + ".") for x in FORBIDDEN):
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

FORBIDDEN = json.loads(sys.argv[2])
sys.meta_path.insert(0, Blocker())
for name in FORBIDDEN:
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} is importable: the blocker does not work")

from specc import LLM, SamplingParams

llm = LLM(sys.argv[1])
result = {}
for plan in llm.engine.plans:
    outputs = LLM(sys.argv[1], plan).generate(
        ["hello world", "ab"], SamplingParams(max_tokens=12, ignore_eos=True)
    )
    result[plan] = [output.outputs[0].token_ids for output in outputs]
loaded = [m for m in sys.modules if any(m == x or m.startswith(x + ".") for x in FORBIDDEN)]
print(json.dumps({"tokens": result, "loaded": loaded}))
"""


def test_an_engine_runs_without_compiler_and_transformers(tiny_engine, tmp_path):
    """In an environment that has neither, all plans generate the same tokens as here."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", DEPLOYED, str(tiny_engine), json.dumps(FORBIDDEN)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["loaded"] == []
    assert set(result["tokens"]) == {"tree-2-1", "chain-3", "off"}

    from specc import LLM, SamplingParams

    params = SamplingParams(max_tokens=12, ignore_eos=True)
    here = LLM(tiny_engine, "off").generate(["hello world", "ab"], params)
    want = [output.outputs[0].token_ids for output in here]
    for plan, tokens in result["tokens"].items():
        assert tokens == want, plan


def test_help_is_instant():
    """Neither torch nor a model library loads for --help."""
    code = (
        "import sys; from typer.testing import CliRunner; from specc.cli import app;"
        "assert CliRunner().invoke(app, ['compile', '--help']).exit_code == 0;"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
