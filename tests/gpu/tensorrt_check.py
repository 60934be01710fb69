"""TensorRT-RTX on a GPU: is an engine built and loaded there, and are the tokens right?

    python3 -P -m tests.gpu.tensorrt_check --wheels DIR

writes the wheels in DIR (for the GPU machine's Python, such as 3.12) as pieces into folders of
build/gpu-check/tensorrt, each of a size that one transfer takes beside the tree. Folders may go to
the machine one at a time. Command R does the rest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.results import Device, Results, Skipped

FOLDER = Path(__file__).resolve().parents[2] / "build/gpu-check/tensorrt"
LIST = "pieces.json"
# of a folder
PIECE_MIB = 11
NUM_PROMPTS, NUM_TOKENS = 8, 64
# a library that hangs on an engine costs no more
DESERIALIZE_S = 20.0
DESERIALIZE = """
import sys
import tensorrt_rtx as trt
logger = trt.Logger(trt.Logger.WARNING)
engine = trt.Runtime(logger).deserialize_cuda_engine(open(sys.argv[1], "rb").read())
print(trt.__version__, "no engine" if engine is None else engine.num_io_tensors)
"""


def split(files: Sequence[Path], folder: Path = FOLDER, most: int = PIECE_MIB << 20) -> list[Path]:
    """Write files as pieces into numbered folders of `most` bytes; returns those."""
    folders: list[Path] = []
    room, listed = 0, {}
    for file in files:
        data, pieces = file.read_bytes(), []
        digest = hashlib.sha256(data).hexdigest()
        while data:
            if not room:
                folders.append(folder / f"call-{len(folders) + 1}")
                folders[-1].mkdir(parents=True)
                room = most
            piece = folders[-1] / f"{file.name}.{len(pieces):02d}"
            piece.write_bytes(data[:room])
            pieces.append(str(piece.relative_to(folder)))
            data, room = data[room:], room - len(data[:room])
        listed[file.name] = {"sha256": digest, "pieces": pieces}
    (folders[-1] / LIST).write_text(json.dumps(listed), encoding="utf-8")
    return folders


def join(folder: Path, target: Path) -> list[Path]:
    """The files that `split` was given.

    Raises:
        Skipped: there are no pieces.
        ValueError: a piece is absent, or has other bytes.
    """
    lists = sorted(folder.glob(f"*/{LIST}"))
    if not lists:
        raise Skipped(f"no pieces in {folder}: run python3 -P -m tests.gpu.tensorrt_check")
    target.mkdir(parents=True, exist_ok=True)
    found = []
    for name, entry in json.loads(lists[-1].read_text(encoding="utf-8")).items():
        absent = [piece for piece in entry["pieces"] if not (folder / piece).exists()]
        if absent:
            raise ValueError(f"{name} lacks {', '.join(absent)}")
        data = b"".join((folder / piece).read_bytes() for piece in entry["pieces"])
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise ValueError(f"{name} has other bytes than when it was split")
        found.append(target / name)
        found[-1].write_bytes(data)
    return found


def check(results: Results, device: Device, folder: str = str(FOLDER)) -> None:
    """Install the library, build the demo pair's engine, and generate with each plan."""
    device.prepare()
    place = Path(folder)
    site = place / "site"
    results.check("install", partial(install, place, site))
    if not site.exists():
        raise Skipped("the library is not installed")
    sys.path.insert(0, str(site))
    engine = place / "engine"
    results.check("compile", partial(build, engine))
    results.check("deserialize", partial(deserialize, engine / "target/model.plan", site))
    for plan in ("off", "chain-4"):
        results.check(plan, partial(generate, engine, plan))


def install(folder: Path, site: Path) -> list[str]:
    """Unpack the wheels where nothing else is."""
    wheels = join(folder, folder / "wheels")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-compile", "--target", str(site), *map(str, wheels)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return [wheel.name for wheel in wheels]


def build(engine: Path) -> dict[str, float]:
    """The demo pair for every GPU that the library knows."""
    from specc import compile
    from tests.gpu.pair import ROOT

    shutil.rmtree(engine, ignore_errors=True)
    begin, pair = time.perf_counter(), ROOT / "examples/pair"
    compile(
        pair / "target", pair / "draft", engine, backend="tensorrt", dtype="float16",
        num_speculative_tokens=4,
    )  # fmt: skip
    return {"seconds": time.perf_counter() - begin}


def deserialize(plan: Path, site: Path) -> dict[str, Any]:
    """What the library says of an engine, in a process that may die or hang."""
    done = subprocess.run(
        [sys.executable, "-c", DESERIALIZE, str(plan)],
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"},
        timeout=DESERIALIZE_S, capture_output=True, text=True,
    )  # fmt: skip
    text = (done.stdout + done.stderr)[-1500:]
    assert done.returncode == 0, text
    assert "no engine" not in text, text
    return {"said": text}


def generate(engine: Path, plan: str) -> dict[str, Any]:
    """Tokens a second, of tokens that are those of the CPU.

    float16 rounds otherwise on a GPU: outputs that part do so at a near tie, which most have not.
    """
    from specc.runtime.llm import LLM
    from tests.gpu.expected import expected_tokens
    from tests.gpu.kinds import tokens_of
    from tests.gpu.pair import pair_prompts

    llm = LLM(engine, plan=plan)
    prompts = [llm.engine.tokenizer.encode(text).ids for text in pair_prompts(NUM_PROMPTS)]
    wanted = expected_tokens(engine, prompts, NUM_TOKENS)
    found = tokens_of(llm, prompts, NUM_TOKENS)
    begin = time.perf_counter()
    tokens_of(llm, prompts, NUM_TOKENS)
    seconds = time.perf_counter() - begin
    equal = sum(own == other for own, other in zip(found, wanted, strict=True))
    assert 2 * equal > len(wanted), f"{equal} of {len(wanted)} outputs are the CPU's"
    return {"equal": equal, "of": len(wanted), "tokens_per_s": sum(map(len, found)) / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, required=True)
    parser.add_argument("--piece-mib", type=int, default=PIECE_MIB)
    options = parser.parse_args()
    files = sorted(options.wheels.glob("*.whl"))
    print(*split(files, FOLDER, options.piece_mib << 20), sep="\n")


if __name__ == "__main__":
    main()
