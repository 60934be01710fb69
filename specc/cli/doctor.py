"""`specc doctor`: what this machine can do, what is missing, and how to get it."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specc.cli import render
from specc.errors import CompilerError, SpeccError
from specc.kernels.library_files import library_path
from specc.system.extras import all_requirements, install_command, supported_versions
from specc.system.files import format_bytes
from specc.system.machine import cpu_model, num_usable_cores, read_text

# what matters of /proc/cpuinfo, on x86 and ARM
_INSTRUCTION_SETS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_bf16",
    "asimd",
    "sve",
    "bf16",
    "i8mm",
)
_MEMORY_KEYS = ("MemTotal", "MemAvailable")
_RANGE = re.compile(r"(>=|<=|==|<|>)\s*([\d.]+)")
# extra → what does not work without it; tests compare the names with pyproject.toml
NEEDED_FOR = {
    "compile": "specc compile, and bench --against transformers",
    "onnx": "the backends onnx and tensorrt",
    "tensorrt": "compiling for --backend tensorrt without a GPU",
    "serve": "specc serve, and chat templates",
    "bench": "specc bench serve --base-url",
    "peers": "specc bench --against other engines",
    "plot": "pictures: --plot, and specc.draw",
    "structured": "outputs that follow a JSON schema, a regex or a grammar",
    "cuda": "running engines of the backend cuda",
    "dev": "specc's own tests",
}


@dataclass(frozen=True)
class Check:
    """One thing that specc uses or will use.

    Args:
        name: as users know it.
        state: `ok`, `missing` or `unsupported`.
        detail: version, path, or what was found instead.
        needed_for: what does not work without it.
        how: how to get it; empty where it is there.
    """

    name: str
    state: str
    detail: str
    needed_for: str
    how: str = ""


def run_doctor(*, as_json: bool) -> None:
    """Print the machine and the checks; missing optional parts are no error."""
    data = examine()
    if as_json:
        print(json.dumps(data, indent=1))
        return
    console = render.make_console()
    cpu, memory = data["cpu"], data["memory"]
    facts = render.make_table(("", ""))
    facts.show_header = False
    facts.add_row("CPU", cpu["model"])
    facts.add_row("cores", f"{cpu['usable_cores']} usable of {cpu['cores']}")
    facts.add_row("instruction sets", " ".join(cpu["instruction_sets"]) or "none of interest")
    facts.add_row(
        "memory",
        f"{_size(memory['total'])}, {_size(memory['available'])} available"
        + (f", limited to {_size(memory['limit'])}" if memory["limit"] else ""),
    )
    facts.add_row("Python", f"{data['python']} on {data['platform']}")
    console.print(facts)
    console.print()
    table = render.make_table(("", "", "found", "needed for"))
    for check in data["checks"]:
        table.add_row(check["state"], check["name"], check["detail"], check["needed_for"])
    console.print(table)
    lacking = [check for check in data["checks"] if check["how"]]
    if lacking:
        console.print()
    for check in lacking:
        console.print(f"{check['name']}: {check['how']}", soft_wrap=True)


def examine() -> dict[str, Any]:
    """Everything that doctor knows, ready for JSON."""
    checks = [
        _package("torch", "everything"),
        _package("transformers", "specc compile (a deployed engine runs without it)", "compile"),
        _operators(),
        _compiler(),
        _direct_reads(Path.cwd()),
        _gpu(),
        _package("triton", "running engines of the backend cuda", "cuda"),
        *_other_runtimes(),
        *_extras(),
    ]
    return {
        "cpu": {
            "model": cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": num_usable_cores(),
            "instruction_sets": _instruction_sets(),
        },
        "memory": _memory(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "checks": [asdict(check) for check in checks],
    }


def _package(name: str, needed_for: str, extra: str = "") -> Check:
    """A Python package and the range of versions that specc supports."""
    needed = supported_versions(name)
    how = f'pip install "{name}{needed}"'
    if extra:
        how = install_command(extra)
    try:
        version = importlib.metadata.version(name)
        importlib.import_module(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "missing", f"supported: {needed}", needed_for, how)
    except (
        Exception
    ) as error:  # a broken installation fails in many ways; all of them are a finding
        return Check(name, "missing", f"{version} fails: {_first_line(error)}", needed_for, how)
    if not is_within(version, needed):
        return Check(name, "unsupported", f"{version}; supported: {needed}", needed_for, how)
    return Check(name, "ok", f"{version} (supported: {needed})", needed_for)


def is_within(version: str, needed: str) -> bool:
    """Whether a version fits bounds such as `<2.14,>=2.11`; a local part is ignored."""
    own = _numbers(version.split("+")[0])
    for sign, bound_text in _RANGE.findall(needed):
        bound = _numbers(bound_text)
        length = max(len(own), len(bound))
        left = own + (0,) * (length - len(own))
        right = bound + (0,) * (length - len(bound))
        holds = {
            ">=": left >= right,
            "<=": left <= right,
            "==": left == right,
            "<": left < right,
            ">": left > right,
        }
        if not holds[sign]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _operators() -> Check:
    """Without them, `specc compile` warns and makes engines that run torch operator by operator."""
    name, needed_for = "CPU operators", "the backend cpu (else: eager, several times slower)"
    try:
        path = library_path()
    except SpeccError as error:
        return Check(name, "missing", error.found, needed_for, error.do)
    return Check(name, "ok", str(path), needed_for)


def _compiler() -> Check:
    needed_for = "installing specc from a checkout (a wheel needs none)"
    try:
        from specc.system.cxx_compiler import compiler_version, find_compiler

        path = find_compiler()
    except CompilerError as error:
        state = "missing" if error.found.startswith("no C++") else "unsupported"
        return Check("C++ compiler", state, error.found, needed_for, error.do)
    except Exception as error:  # torch, see _package
        return Check("C++ compiler", "missing", f"torch fails: {_first_line(error)}", needed_for)
    kind, version = compiler_version(path)
    return Check("C++ compiler", "ok", f"{path}: {kind} {_dotted(version)}", needed_for)


def _direct_reads(directory: Path) -> Check:
    """Reads past the page cache, on the file system of a directory."""
    name, needed_for = "O_DIRECT", "--offload-weights at the speed of the disk (engines there)"
    try:
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
    except (OSError, AttributeError) as error:
        found = f"not on the file system of {directory}: {_first_line(error)}"
        return Check(name, "missing", found, needed_for, "keep engines on a local disk")
    return Check(name, "ok", f"on the file system of {directory}", needed_for)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _gpu() -> Check:
    """A GPU that torch can use; the driver and torch's build may disagree."""
    needed_for = "running engines of the backend cuda (compiling them needs none)"
    try:
        import torch

        if torch.cuda.is_available():
            names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
            return Check("GPU", "ok", f"{', '.join(names)}, CUDA {torch.version.cuda}", needed_for)
        build = "this torch is a CPU build" if torch.version.cuda is None else "torch sees none"
    except Exception as error:  # see _package
        build = f"torch fails: {_first_line(error)}"
    query = "--query-gpu=name,driver_version,memory.total"
    path = shutil.which("nvidia-smi")
    seen = _output([path, query, "--format=csv,noheader"]) if path else ""
    if seen:
        detail = f"{'; '.join(seen.splitlines())}; {build}"
        return Check("GPU", "unsupported", detail, needed_for, "install torch's CUDA build")
    return Check("GPU", "missing", build, needed_for, "use a machine with an NVIDIA GPU and driver")


def _other_runtimes() -> list[Check]:
    packages = (
        ("ONNX", "onnx", install_command("onnx"), "specc compile --backend onnx or tensorrt"),
        (
            "ONNX Script",
            "onnxscript",
            install_command("onnx"),
            "specc compile --backend onnx or tensorrt",
        ),
        (
            "ONNX Runtime",
            "onnxruntime",
            install_command("onnx"),
            "running engines of the backend onnx",
        ),
        (
            "TensorRT",
            "tensorrt",
            "pip install tensorrt",
            "--backend tensorrt, on a machine with the GPU",
        ),
        (
            "TensorRT-RTX",
            "tensorrt_rtx",
            install_command("tensorrt"),
            "--backend tensorrt without a GPU",
        ),
    )
    checks = []
    for name, module, how, needed_for in packages:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            checks.append(Check(name, "missing", "", needed_for, how))
        except Exception as error:  # see _package
            again = how.replace("pip install", "pip install --force-reinstall")
            checks.append(Check(name, "missing", _first_line(error), needed_for, again))
        else:
            checks.append(Check(name, "ok", getattr(found, "__version__", "?"), needed_for))
    return checks


def _extras() -> list[Check]:
    """The extras that `pip install` takes; those of developers are not missed."""
    return [
        Check(f"extra {name}", state, detail, NEEDED_FOR.get(name, ""), how)
        for name, packages in extras().items()
        for state, detail, how in [describe(name, packages)]
        if name != "dev"
    ]


def _instruction_sets() -> list[str]:
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", read_text("/proc/cpuinfo"), re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    return [name for name in _INSTRUCTION_SETS if name in flags]


def _memory() -> dict[str, int | None]:
    text = read_text("/proc/meminfo")
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE))
    limit = read_text("/sys/fs/cgroup/memory.max").strip()
    kib = {key: int(sizes[key]) * 1024 if key in sizes else None for key in _MEMORY_KEYS}
    return {
        "total": kib["MemTotal"],
        "available": kib["MemAvailable"],
        "limit": int(limit) if limit.isdigit() else None,
    }


def _size(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else format_bytes(num_bytes)


def _output(command: list[str]) -> str:
    """What a program prints; empty where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def extras() -> dict[str, dict[str, str]]:
    """Extra → its packages with their versions; empty where specc has no metadata.

    An extra that another one includes is not repeated in it.
    """
    found: dict[str, dict[str, str]] = {}
    for name, nested, versions, extra in all_requirements():
        if extra and not nested:
            found.setdefault(extra, {})[name] = versions
    return found


def describe(extra: str, packages: dict[str, str]) -> tuple[str, str, str]:
    """State of an extra, what was found of it, and how to get what is missing."""
    versions = {name: _version(name) for name in packages}
    missing = [name for name, version in versions.items() if version is None]
    if not missing:
        return "ok", ", ".join(f"{name} {version}" for name, version in versions.items()), ""
    wanted = " ".join(f'"{name}{packages[name]}"' for name in missing)
    return "missing", f"without {', '.join(missing)}", f"pip install {wanted}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
