r"""Resident memory of an engine beside llama.cpp on the file that it was compiled from.

Each runs in a process of its own: it loads, generates 64 tokens, and says what of it is in memory:
all (`Rss`), what no file backs (`Anonymous`), and the most that there was (`VmHWM`). Before that, a
process that has imported specc's runtime and loaded nothing says the same.

    python -m tests.measure.resident_memory ENGINE FILE.gguf --json out.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROMPT = "The history of the bicycle begins with"
CONTEXT, NUM_TOKENS = 2048, 64

_SAID = r"""
import json, re
def said():
    found = {}
    for file, keys in (("smaps_rollup", ("Rss", "Anonymous")), ("status", ("VmHWM",))):
        text = open(f"/proc/self/{file}").read()
        found |= {key: int(re.search(rf"^{key}:\s+(\d+)", text, re.M)[1]) << 10 for key in keys}
    return found
"""
_ENGINE = (
    _SAID
    + r"""
import sys
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
imported = said()
options = {"max_num_seqs": 1, "max_model_len": %(context)d} if %(bounded)s else {}
llm = LLM(sys.argv[1], plan="off", **options)
loaded = said()
llm.generate([sys.argv[2]], SamplingParams(temperature=0, max_tokens=%(tokens)d, ignore_eos=True))
print(json.dumps({"imported": imported, "loaded": loaded, "generated": said()}))
"""
)
_LLAMA_CPP = (
    _SAID
    + r"""
import sys
import llama_cpp
imported = said()
model = llama_cpp.Llama(sys.argv[1], n_ctx=%(context)d, verbose=False)
loaded = said()
model(sys.argv[2], max_tokens=%(tokens)d, temperature=0)
print(json.dumps({"imported": imported, "loaded": loaded, "generated": said()}))
"""
)


def run(code: str, path: Path, **more: Any) -> dict[str, dict[str, int]]:
    """Bytes after each stage of one process."""
    given = {"context": CONTEXT, "tokens": NUM_TOKENS, "bounded": False} | more
    command = [sys.executable, "-P", "-c", code % given, str(path), PROMPT]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, dict[str, int]] = json.loads(made.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = {
        "file_bytes": options.file.stat().st_size,
        "specc": run(_ENGINE, options.engine),
        "specc, one request": run(_ENGINE, options.engine, bounded=True),
        "llama.cpp": run(_LLAMA_CPP, options.file),
    }
    for name in ("specc", "specc, one request", "llama.cpp"):
        stages = report[name]
        said = ", ".join(
            f"{stage} {sizes['Rss'] / 1e6:.0f} ({sizes['Anonymous'] / 1e6:.0f} of its own)"
            for stage, sizes in stages.items()
        )
        print(f"{name}: MB {said}; most {stages['generated']['VmHWM'] / 1e6:.0f}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
