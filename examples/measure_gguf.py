"""Measure plain decoding of a 1B Llama in Q4_0 beside llama.cpp: the same file, in turns.

    python examples/measure_gguf.py make --output M          # needs the package gguf
    specc compile --target M --draft lookup --backend cpu --max-batch-size 1 --max-seq-len 512 -o E
    OMP_NUM_THREADS=2 python examples/measure_gguf.py run E --model M/model.gguf \
      --llama-bench build/bin/llama-bench --threads 2 --json gguf.json

The weights are drawn: 16 layers, hidden 2048, intermediate 8192, 32 heads, 8 KV heads, 973 M
parameters besides the embedding, whose vocabulary, 2048, is that of the demo pair's tokenizer: the
head of a real model of this size takes a fifth more. What is drawn has no meaning, and no
speculation is measured with it. Each round generates so many tokens with each, after the other.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from specc.system.machine import describe_machine

PAIR = Path(__file__).parent / "pair" / "target"
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, LAYERS, VOCAB = 2048, 8192, 32, 8, 16, 2048
app = typer.Typer(no_args_is_help=True)


def blocks(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """A matrix in Q4_0: of 32 columns a scale in half precision and 16 bytes of nibbles."""
    scales = np.full((rows * columns // 32, 1), 0.1 / np.sqrt(columns), np.float16)
    nibbles = rng.integers(0, 256, (rows * columns // 32, 16), dtype=np.uint8)
    whole = np.concatenate([scales.view(np.uint8), nibbles], axis=1)
    return whole.reshape(rows, columns // 32 * 18)


@app.command()
def make(output: Annotated[Path, typer.Option()]) -> None:
    """Write model.gguf with config.json and the demo pair's tokenizer beside it."""
    import gguf

    output.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PAIR / name, output / name)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu",
    }  # fmt: skip
    (output / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(output / "model.gguf", "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")
    kind = gguf.GGMLQuantizationType.Q4_0

    def add(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(f"{name}.weight", blocks(rng, rows, columns), raw_dtype=kind)

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))

    kv = HIDDEN // HEADS * KV_HEADS
    add("token_embd", VOCAB, HIDDEN)
    for i in range(LAYERS):
        add_norm(f"blk.{i}.attn_norm")
        for name, rows, columns in (
            ("attn_q", HIDDEN, HIDDEN), ("attn_k", kv, HIDDEN), ("attn_v", kv, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN), ("ffn_gate", INTERMEDIATE, HIDDEN),
            ("ffn_up", INTERMEDIATE, HIDDEN), ("ffn_down", HIDDEN, INTERMEDIATE),
        ):  # fmt: skip
            add(f"blk.{i}.{name}", rows, columns)
        add_norm(f"blk.{i}.ffn_norm")
    add_norm("output_norm")
    add("output", VOCAB, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@app.command()
def run(
    engine: Path,
    model: Annotated[Path, typer.Option()],
    llama_bench: Annotated[Path, typer.Option()],
    threads: Annotated[int, typer.Option()] = 2,
    tokens: Annotated[int, typer.Option()] = 64,
    rounds: Annotated[int, typer.Option()] = 5,
    output: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Tokens a second of both, round by round."""
    from specc.runtime.engine import Engine
    from specc.runtime.llm import LLM
    from specc.sampling.params import SamplingParams

    loaded = Engine.load(engine, num_threads=threads)
    llm = LLM(loaded, plan="off")
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    command = [str(llama_bench), "-m", str(model), "-p", "0", "-n", str(tokens), "-r", "1"]
    command += ["-t", str(threads), "-o", "json"]
    speeds: dict[str, list[float]] = {"specc": [], "llama.cpp": []}
    facts: dict[str, Any] = {}
    for i in range(rounds + 1):
        start = time.perf_counter()
        llm.generate([[5, 6, 7, 8]], params)
        own = tokens / (time.perf_counter() - start)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        (facts,) = json.loads(done.stdout)
        if i:  # the first warms both up
            speeds["specc"].append(own)
            speeds["llama.cpp"].append(facts["avg_ts"])
            typer.echo(f"specc {own:.1f}, llama.cpp {facts['avg_ts']:.1f} tokens/s", err=True)
    ratios = [a / b for a, b in zip(*speeds.values(), strict=True)]
    found = {
        "command": "python examples/measure_gguf.py run E --model M/model.gguf"
        f" --llama-bench llama-bench --threads {threads} --tokens {tokens} --rounds {rounds}",
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "dtype": loaded.manifest.dtype,
        "threads": threads,
        "tokens": tokens,
        "llama.cpp": {key: facts[key] for key in ("build_commit", "build_number", "model_type")},
        "tokens_per_s": {name: statistics.median(values) for name, values in speeds.items()},
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }
    text = json.dumps(found, indent=1) + "\n"
    typer.echo(text)
    if output is not None:
        output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    app()
