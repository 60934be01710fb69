"""What a batch with adapters costs beside the same batch without them, on the CPU.

Writes adapters of random terms for a target, as PEFT does, compiles them beside it, and times
batches of one request an adapter by turns with batches without: seconds of a generation without
drafts. What is printed is the median of the ratios within a round, beside how many bytes the terms
add to those of the weights, which is what a machine that only reads would show.

    python tests/measure/widen_target.py --source examples/pair/target --parameters 100M --output T
    python tests/measure/mixed_adapters.py T --rank 8 --modules q_proj v_proj --work out/adapters
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from specc import LLM, SamplingParams, compile
from specc.system.machine import describe_machine

PROMPT = "def read(path):"


def write_adapter(sizes: dict[str, tuple[int, int]], rank: int, seed: int, path: Path) -> None:
    """A directory of PEFT's with random terms.

    Args:
        sizes: of each projection, (inputs, outputs).
    """
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (inputs, outputs) in sizes.items():
        down = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        up = 0.02 * torch.randn(outputs, rank, generator=generator)
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    config: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank}
    config |= {"lora_alpha": rank, "bias": "none", "inference_mode": True}
    config["target_modules"] = sorted({name.rpartition(".")[2] for name in sizes})
    (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def seconds(llm: Any, names: list[str | None], num_tokens: int) -> float:
    """Of the tokens after the first, of a batch with one request for each name."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    prompts = [f"# {i}\n{PROMPT}" for i in range(len(names))]
    events = llm.stream(prompts, params, lora_request=names)
    times = [time.perf_counter() for _ in events]
    return times[-1] - times[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("target", type=Path)
    add("--work", type=Path, default=Path("out/adapters"))
    add("--num-adapters", type=int, default=8)
    add("--rank", type=int, default=8)
    add("--modules", nargs="+", default=["q_proj", "k_proj", "v_proj", "o_proj"])
    add("--dtype", default="float32")
    add("--num-tokens", type=int, default=48)
    add("--rounds", type=int, default=9)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.target)
    sizes = {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in args.modules
    }
    added = args.num_adapters * args.rank * sum(map(sum, sizes.values()))
    read = sum(p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name)
    if model.config.tie_word_embeddings:
        read += model.get_input_embeddings().weight.numel()
    lora = {}
    for index in range(args.num_adapters):
        lora[f"a{index}"] = path = args.work / f"adapter{index}"
        write_adapter(sizes, args.rank, index, path)
    shutil.rmtree(engine := args.work / "engine", ignore_errors=True)
    compile(args.target, None, engine, lora=lora, dtype=args.dtype)
    llm, none = LLM(engine), [None] * args.num_adapters
    seconds(llm, none, args.num_tokens)
    seconds(llm, [*lora], args.num_tokens)
    ratios, same = [], []
    for _ in range(args.rounds):
        plain = seconds(llm, none, args.num_tokens)
        ratios.append(seconds(llm, [*lora], args.num_tokens) / plain)
        same.append(seconds(llm, ["a0"] * args.num_adapters, args.num_tokens) / plain)
        print(f"{ratios[-1]:.3f} mixed, {same[-1]:.3f} one adapter", flush=True)
    print(json.dumps({
        "rank": args.rank, "modules": args.modules, "dtype": args.dtype,
        "mixed": round(statistics.median(ratios), 3), "one": round(statistics.median(same), 3),
        "bytes": round(1 + added / read, 3), "machine": describe_machine(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
