"""The arrows of the architecture: what may import what, and what a deployed engine needs."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from specc.version import __version__

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"specc": "specc", "passes": "specc.passes", "runtime": "specc.runtime"}
FOLDERS["kernels"] = "specc.kernels"

# layer of each package, which says what others than specc it may import; the longest name counts
LAYER_OF = {
    "__init__": "facade",
    "__main__": "cli",
    "api": "api",
    "artifact": "facts",
    "compile_request": "facts",
    "bench": "bench",
    "bench.peers": "peers",
    "cli": "cli",
    "close_name": "facts",
    "compiler": "compiler",
    "bounds": "facts",
    "config": "facts",
    "cost": "facts",
    "drafters": "facts",
    "dtypes": "facts",
    "draw": "bench",
    "errors": "facts",
    "features": "facts",
    "fit": "fit",
    "inputs": "facts",
    "kernels": "kernels",
    "lora": "facts",
    "load": "bench",
    "option": "facts",
    "outputs": "runtime",
    "passes": "passes",
    "percentile": "facts",
    "refusals": "facts",
    "refuse_running": "facts",
    "progress": "facts",
    "quantize_options": "facts",
    "runtime": "runtime",
    "sampling": "facts",
    "sampling_params": "facts",
    "server": "serve",
    "sharding": "facts",
    "simulate": "bench",
    "speculation": "facts",
    "system": "facts",
    "tensorrt": "facts",
    "triton": "facts",
    "tune": "tune",
    "version": "facts",
    "vllm": "facts",
    # what is measured for a profile knows nothing of the compiler, which `tune` calls
    "tune.acceptance": "bench",
    "tune.latency": "bench",
}
# layer → packages besides the standard library
PACKAGES = {
    "facts": {"torch", "safetensors", "tokenizers", "numpy"},
    "kernels": {"torch", "triton"},
    "passes": {
        "torch", "transformers", "huggingface_hub", "tokenizers", "sympy",
        "onnx", "onnx_ir", "onnxscript",
    },
    "runtime": {
        "torch", "safetensors", "tokenizers", "onnx", "onnxruntime", "llguidance",
        # tqdm only where a caller asks for its bar
        "numpy", "jinja2", "tqdm",
    },
    "compiler": {"torch", "tokenizers"},
    "api": {"torch"},
    "bench": {
        "torch", "transformers", "matplotlib", "networkx", "aiohttp", "yarl", "prometheus_client",
    },
    "peers": {
        "torch", "transformers", "safetensors", "numpy",
        "onnxruntime_genai", "openvino", "openvino_genai", "openvino_tokenizers",
        "nncf", "llama_cpp", "gguf",
    },
    "tune": {"torch"},
    "fit": {"torch", "transformers", "safetensors"},
    "serve": {
        "fastapi", "starlette", "pydantic", "uvicorn", "h11", "prometheus_client",
        "anthropic", "jiter", "typing_extensions",
        "tokenizers", "numpy",
    },
    "cli": {"torch", "typer", "rich"},
    "facade": set(),
}  # fmt: skip
# the command line answers --help before anything heavy loads: in these files everything but the
# standard library and the listed modules is imported inside functions
_COMMANDS = tuple(
    f"specc.cli.commands.{name}"
    for name in (
        "bench",
        "chat",
        "compare",
        "compile",
        "draft_weights",
        "fit_draft",
        "reshard",
        "run",
        "serve",
        "triton",
        "tune",
    )
)
# modules whose dataclasses are options of commands
_FACTS = {"specc.close_name", "specc.errors", "specc.option", "specc.system.machine"}
_MEASURED = {*_FACTS, "specc.cli.options.common"}
_OPTIONS = {
    "specc.cli.options.bench": {
        *_MEASURED,
        "specc.runtime.engine_args",
        "specc.bench.peers.names",
    },
    "specc.cli.options.drafts": _FACTS,
    "specc.config": {
        *_FACTS,
        "specc.artifact.backends",
        "specc.dtypes",
        "specc.artifact.kv_rows",
        "specc.artifact.mixes",
        "specc.artifact.mla_cache",
        "specc.compile_request",
        "specc.features",
        "specc.quantize_options",
        "specc.refusals",
    },
    "specc.compile_request": {"specc.artifact.backends", "specc.errors"},
    "specc.features": {
        "specc.artifact.backends",
        "specc.artifact.mixes",
        "specc.compile_request",
        "specc.drafters.facts",
        "specc.quantize_options",
    },
    "specc.quantize_options": {"specc.artifact.mixes", "specc.close_name", "specc.errors"},
    "specc.refusals": {
        "specc.artifact.backends",
        "specc.artifact.mixes",
        "specc.compile_request",
        "specc.drafters.facts",
        "specc.features",
        "specc.quantize_options",
    },
    "specc.cli.options.load": {*_MEASURED, "specc.runtime.engine_args"},
    "specc.cli.options.common": _FACTS,
    "specc.cli.options.sampling": _FACTS,
    "specc.cli.options.triton": _FACTS,
    "specc.runtime.engine_args": _FACTS
    | {"specc.runtime.engine_checks", "specc.vllm.answers", "specc.vllm.engine_options"},
    "specc.vllm.answers": {"specc.close_name", "specc.errors"},
    "specc.vllm.engine_options": {"specc.vllm.answers"},
    "specc.server.config": {
        *_FACTS,
        "specc.server.admin_options",
        "specc.server.origin_options",
        "specc.server.parsers.names",
    },
    "specc.server.admin_options": {"specc.errors", "specc.option"},
    "specc.server.origin_options": {"specc.errors", "specc.option"},
    "specc.triton.config": {*_FACTS, "specc.triton.tensors"},
    "specc.tune.options": _FACTS,
    "specc.fit.options": _FACTS,
}
_WITH_OPTIONS = "specc.cli.options.with_options"
LAZY = {
    "specc.cli.main": {"typer", "specc.cli.app", *_COMMANDS},
    "specc.cli.app": {
        "typer",
        "typer.core",
        "typer.main",
        "specc.errors",
        _WITH_OPTIONS,
    },
    **{
        name: {"typer", "specc.cli.app", "specc.errors", _WITH_OPTIONS, *_OPTIONS}
        for name in _COMMANDS
    },
    "specc.cli.commands.compile": {"typer", "specc.cli.app", "specc.system.garbage", *_OPTIONS},
    **_OPTIONS,
    _WITH_OPTIONS: {"typer", "specc.option"},
    "specc.errors": set(),
    "specc.option": {"specc.errors"},
    "specc.system.machine": {"specc.errors"},
    "specc.system.garbage": set(),
    "specc.server.parsers.names": {"specc.close_name", "specc.errors"},
    "specc.triton.tensors": set(),
    "specc.bench.peers.names": {"specc.close_name", "specc.errors"},
    "specc.close_name": set(),
    "specc.__init__": {"specc.version"},
}
MAX_LINES = 450


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("**/*.py"))]


def module_of(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS[folder], *rest])


def layer_of(module: str) -> str:
    """Layer of a module, or of the package that it names."""
    parts = module.split(".")[1:] or ["__init__"]
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    found = next((name for name in names if name in LAYER_OF), None)
    assert found is not None, f"{module} is in no package that has a layer"
    return LAYER_OF[found]


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


def test_other_packages_are_those_of_the_layer():
    """Which modules of specc may import which others: the contracts of pyproject.toml."""
    assert [wrong for path in sources() for wrong in foreign_imports(path)] == []


def foreign_imports(path: Path) -> Iterator[str]:
    """Imports of packages that the layer of a file may not see."""
    module = module_of(path)
    layer = layer_of(module)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if layer == "facade":  # names for type checkers only; the rest is resolved on access
        tree.body = [node for node in tree.body if not is_type_checking(node)]
    for name in imported(tree):
        top = name.split(".")[0]
        if top not in {"specc", *sys.stdlib_module_names, *PACKAGES[layer]}:
            yield f"{module} ({layer}) imports {name}"


def test_the_table_names_every_package():
    """A new package or file of specc/ states its layer here; a removed one leaves the table."""
    modules = {module_of(path).removeprefix("specc.") for path in sources()}
    assert {module.split(".")[0] for module in modules} == {x.split(".")[0] for x in LAYER_OF}
    packages = {name.removesuffix(".__init__") for name in modules}
    assert {x for x in LAYER_OF if "." in x} <= modules | packages


def test_a_wheel_holds_every_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = {
        module_of(path).removesuffix(".__init__")
        for path in sources()
        if path.name == "__init__.py"
    }
    folders = project["tool"]["scikit-build"]["wheel"]["packages"]
    for package in found:
        names = package.split(".")
        # the longest one that is listed, and the rest as folders below
        listed = next(n for n in range(len(names), 0, -1) if "/".join(names[:n]) in folders)
        path = ROOT.joinpath(folders["/".join(names[:listed])], *names[listed:])
        assert (path / "__init__.py").is_file(), package
    assert {module_of(path).rpartition(".")[0] for path in sources()} <= found


def test_the_version_is_said_once_more_and_the_same():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["version"] == __version__


@pytest.mark.parametrize("name", sorted(LAZY))
def test_heavy_imports_are_lazy(name):
    (path,) = (path for path in sources() if module_of(path) == name)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top_level = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    found = {module for node in top_level for module in imported(node)}
    assert {x for x in found if x.split(".")[0] not in sys.stdlib_module_names} <= LAZY[name]


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts on a tree that holds the package."""
    program = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [str(program), "--config", str(ROOT / "pyproject.toml"), "--no-cache", "--no-logo"],
        env={**os.environ, "PYTHONPATH": str(tree)},
        cwd=tree,
        capture_output=True,
        text=True,
    )


def test_imports_follow_the_arrows(tmp_path):
    """Wrong ones are found, and they alone: in a function, of a submodule by its parent's name."""
    package = tmp_path / "specc"
    package.mkdir()
    for path in (ROOT / "specc").iterdir():
        (package / path.name).symlink_to(path)
    for name in ("passes", "kernels"):
        (package / name).symlink_to(ROOT / name)
    (package / "runtime").mkdir()
    for path in (ROOT / "runtime").iterdir():
        (package / "runtime" / path.name).symlink_to(path)
    wrong = {
        package / "runtime/wrong.py": "specc.passes.frontend import trace",
        package / "runtime/worse.py": "specc.compiler import build",
    }
    for path, what in wrong.items():
        path.write_text(f'"""Wrong."""\n\n\ndef f():\n    from {what}\n', encoding="utf-8")
    found = lint_imports(tmp_path)
    assert found.returncode == 1, found.stdout + found.stderr
    # no others: `make lint` says nothing of the tree itself
    assert re.findall(r"specc\S* -> specc\S*", found.stdout) == [
        "specc.runtime.wrong -> specc.passes.frontend.trace",
        "specc.runtime.worse -> specc.compiler.build",
    ]


@pytest.mark.parametrize("name", ["kernels", "passes", "runtime"])
def test_folders_have_no_bare_import_name(name):
    """Hugging Face publishes a package `kernels`, and transformers runs whatever it finds there."""
    spec = importlib.util.find_spec(name)
    assert spec is None or spec.origin is None or ROOT not in Path(spec.origin).parents


def test_package_files_have_no_side_effects():
    files = [p for p in sources() if p.name == "__init__.py" and p.parent != ROOT / "specc"]
    assert len(files) > 20
    for path in files:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            assert isinstance(node, ast.Expr), module_of(path)
            assert isinstance(node.value, ast.Constant), module_of(path)


def test_files_are_short():
    lengths = {module_of(p): p.read_text(encoding="utf-8").count("\n") for p in sources()}
    assert {module: count for module, count in lengths.items() if count > MAX_LINES} == {}


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
    # of several processes: an engine of one has nothing to do with them
    *(
        f"specc.runtime.ranks.{name}"
        for name in ("launch", "leader", "channel", "rendezvous", "group", "sockets")
    ),
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

# torch itself imports parts of it, and more where shapes are computed without values
import torch
torch.cat([torch.empty(1, 2, device="meta") @ torch.empty(2, 1, device="meta")] * 2)
before = {m for m in sys.modules if m.startswith("torch.distributed")}
from specc import LLM, SamplingParams

llm = LLM(sys.argv[1])
result = {}
for plan in llm.engine.plans:
    outputs = LLM(sys.argv[1], plan).generate(
        ["hello world", "ab"], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    )
    result[plan] = [output.outputs[0].token_ids for output in outputs]
loaded = [m for m in sys.modules if any(m == x or m.startswith(x + ".") for x in FORBIDDEN)]
loaded += [m for m in sys.modules if m.startswith("torch.distributed") and m not in before]
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

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    here = LLM(tiny_engine, "off").generate(["hello world", "ab"], params)
    want = [output.outputs[0].token_ids for output in here]
    for plan, tokens in result["tokens"].items():
        assert tokens == want, plan


def test_help_is_instant():
    """Neither torch nor a model library loads for --help."""
    code = (
        "import sys; from typer.testing import CliRunner; from specc.cli.main import app;"
        "assert CliRunner().invoke(app, ['compile', '--help']).exit_code == 0;"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
