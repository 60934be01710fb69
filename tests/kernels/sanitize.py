"""`make sanitize`: the C++ operators under the address and the undefined-behavior sanitizer.

The library is built by a compiler that adds both, into a cache of its own, and tests/kernels runs
against it: the tests of the operators, and calls with hostile arguments, more of them than in
`make test`. The first access beside a buffer, the first sum that overflows and the like end a run.
torch itself is not built that way: its tensors are watched, its own code is not. Leaks are not
looked for, since Python and torch keep memory until the process ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from specc.errors import CompilerError, SpeccError
from specc.kernels.library_files import DIR_VARIABLE, library_path
from specc.system.cxx_compiler import compiler_version, find_compiler
from tests.library_build import LibraryBuild

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "sanitize"
REPORTS = WORK / "reports"
NUM_CALLS = 2000
FLAGS = (
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer", "-g1",
)  # fmt: skip
OPTIONS = ("ASAN_OPTIONS", "UBSAN_OPTIONS")
# a kernel that asks for more than a tensor of these tests could have was told to by an argument
MAX_ALLOCATION_MB = 2048
# what tests say that call the operators
WORDS = ("native", "implementation")
# draws a great many times what the other tests draw: minutes become an hour
LEFT_OUT = ("test_distribution.py",)

# what each sanitizer has to find, and says of it
BROKEN = """
#include <vector>
extern "C" int beyond(int n) { std::vector<int> v(n); return v.data()[n]; }
extern "C" int overflow(int n) { return n + 2147483647; }
"""
FINDINGS = {
    "beyond": "AddressSanitizer: heap-buffer-overflow",
    "overflow": "signed integer overflow",
}


def main() -> int:
    os.chdir(ROOT)
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir(parents=True)
    os.environ["SPECC_CACHE_DIR"] = str(WORK / "cache")
    try:
        compiler = sanitizing_compiler()
        os.environ["CXX"] = compiler
        print("specc: building the operators with sanitizers (2 minutes)", flush=True)
        library = build(compiler).read_bytes()
        if b"__asan_report" not in library or b"__ubsan_handle" not in library:
            raise CompilerError(
                "a library without the sanitizers' calls", "both sanitizers", f"check {compiler}"
            )
        os.environ.update(environment(compiler))
        expect_findings(compiler)
    except SpeccError as error:
        print(error, file=sys.stderr)
        return 2
    pytest = str(Path(sys.executable).with_name("pytest"))
    # faults are the sanitizers', whose report says more than Python's
    plugins = ["-p", "no:cacheprovider", "-p", "no:faulthandler", "--capture=sys"]
    command = [pytest, *plugins, *sys.argv[1:], *files()]
    code = subprocess.run(command).returncode
    reports = sorted(REPORTS.iterdir())
    for report in reports:
        print(f"--- {report.name}", report.read_text(errors="replace"), sep="\n")
    if code or reports:
        print(f"specc: the sanitizers' run failed, with {len(reports)} reports", file=sys.stderr)
    return code or bool(reports)


def build(compiler: str) -> Path:
    """The library of this machine's best set, made by this compiler, for processes from now on.

    Raises:
        CompilerError: it cannot be built.
    """
    output = WORK / "lib"
    os.environ[DIR_VARIABLE] = str(output)
    flags = f"-DSPECC_FLAGS={';'.join(FLAGS)}"
    options = [f"-DCMAKE_CXX_COMPILER={compiler}", "-DSPECC_ISAS=native", flags]
    done = LibraryBuild(ROOT, WORK / "objects", output, options).build()
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise CompilerError("the library cannot be built", "g++ with sanitizers", "see above")
    return library_path()


def sanitizing_compiler() -> str:
    """Path of a script that stands for the compiler and the sanitizers' flags."""
    compiler = find_compiler()
    if compiler_version(compiler)[0] != "gcc":
        raise CompilerError(
            f"{compiler} is no GCC", "g++, whose sanitizers are shared libraries", "set CXX to g++"
        )
    os.environ["CXX"] = " ".join((compiler, *FLAGS))
    return find_compiler()


def environment(compiler: str) -> dict[str, str]:
    """What makes Python, which knows no sanitizer, load them first."""
    libraries = []
    for name in ("libasan.so", "libubsan.so"):
        command = [compiler, f"-print-file-name={name}"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(found).is_file():
            raise CompilerError(f"{compiler} has no {name}", "GCC's sanitizers", "install them")
        libraries.append(found)
    common = f"log_path={REPORTS}/report"
    # SIGBUS belongs to the tests of weights that are cut while they are mapped
    address = f"detect_leaks=0:handle_sigbus=0:max_allocation_size_mb={MAX_ALLOCATION_MB}"
    address += ":allocator_may_return_null=1"
    return {
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": f"{common}:{address}",
        "UBSAN_OPTIONS": f"{common}:print_stacktrace=1",
        "SPECC_HOSTILE_CALLS": os.environ.get("SPECC_HOSTILE_CALLS", str(NUM_CALLS)),
    }


def expect_findings(compiler: str) -> None:
    """Call what is broken on purpose: a run in which nobody looks finds nothing."""
    with tempfile.TemporaryDirectory(dir=WORK) as name:
        source, library = Path(name, "broken.cpp"), Path(name, "broken.so")
        source.write_text(BROKEN)
        flags = ["-fPIC", "-shared", "-O1"]
        subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
        for function, finding in FINDINGS.items():
            code = f"import ctypes; ctypes.CDLL({str(library)!r}).{function}(9)"
            to_stderr = {key: os.environ[key] + ":log_path=stderr" for key in OPTIONS}
            result = subprocess.run(
                [sys.executable, "-c", code],
                env=os.environ | to_stderr,
                capture_output=True,
                text=True,
            )
            if result.returncode == 0 or finding not in result.stderr:
                raise CompilerError(
                    f"a call of code that is broken ended with code {result.returncode}",
                    f"a report of {finding}",
                    "check that the sanitizers of this compiler work",
                )


def files() -> list[str]:
    """Test files that call the operators."""
    folders = [ROOT / "tests" / "kernels" / folder for folder in ("", "cpu", "reference")]
    paths = [path for folder in folders for path in folder.glob("test_*.py")]
    paths.append(ROOT / "tests" / "runtime" / "ranks" / "test_group.py")
    return [
        str(path.relative_to(ROOT))
        for path in sorted(paths)
        if path.name not in LEFT_OUT and any(word in path.read_text() for word in WORDS)
    ]


if __name__ == "__main__":
    sys.exit(main())
