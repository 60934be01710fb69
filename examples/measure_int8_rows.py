"""How far caches of int8 move the logits of a target: over texts, beside rows of the model's type.

    python examples/measure_int8_rows.py --target examples/pair/target --json FILE

Both engines read each text in chunks of 64 tokens, as a prompt, so that later chunks attend to rows
that were written before. Logits of every position count. Texts are the Python sources of this
package, read from their beginning.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from specc.artifact.kv_rows import KV_CACHE_DTYPES
from specc.compiler.build import build
from specc.config import CompileConfig
from specc.runtime.engine import Engine

CHUNK = 64


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=Path("examples/pair/target"))
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of a text")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


@torch.inference_mode()
def logits_of(engine: Engine, tokens: list[int]) -> Tensor:
    """[tokens, V] float32 logits of one text, whose rows are written anew."""
    table = engine.cache.block_table([list(range(engine.cache.shape.blocks_per_sequence))])
    found = []
    for first in range(0, len(tokens), CHUNK):
        places = torch.arange(first, min(first + CHUNK, len(tokens)))
        found.append(
            engine.target(
                torch.tensor(tokens)[places],
                places,
                torch.tensor([0, len(places)], dtype=torch.int32),
                places.int(),
                torch.tensor([first], dtype=torch.int32),
                None,
                table,
                torch.arange(len(places)),
            ).float()
        )
    return torch.cat(found)


def main() -> None:
    options = parse()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    sources = sorted((Path(__file__).parent.parent / "specc").rglob("*.py"))
    sources = sorted(sources, key=lambda path: -path.stat().st_size)[: options.texts]
    texts = [
        tokenizer.encode(path.read_text(encoding="utf-8"))[: options.tokens] for path in sources
    ]
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for kind in KV_CACHE_DTYPES:
            config = CompileConfig(
                dtype=options.dtype, max_batch_size=1, max_seq_len=options.tokens, probe=False,
                backend=options.backend, prefill_chunk=CHUNK, kv_cache_dtype=kind,
            )  # fmt: skip
            path = Path(directory) / kind
            build(options.target, None, path, config)
            engine = Engine.load(path)
            found.append(torch.cat([logits_of(engine, text) for text in texts]))
    plain, rounded = found
    error = rounded - plain
    chosen = plain.log_softmax(-1)
    divergence = (chosen.exp() * (chosen - rounded.log_softmax(-1))).sum(-1)
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "target": str(options.target),
        "dtype": options.dtype,
        "backend": options.backend,
        "positions": len(plain),
        "logits_rms": round(float(plain.std()), 4),
        "error_rms": round(float(error.square().mean().sqrt()), 5),
        "error_max": round(float(error.abs().max()), 4),
        "divergence_nats": round(float(divergence.mean()), 7),
        "same_argmax": round(float((plain.argmax(-1) == rounded.argmax(-1)).float().mean()), 5),
    }
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
