"""Train the long-context demo target: 3.7 M parameters, 8192 positions, on one CPU core.

It begins as layers of the demo pair's target (`examples/pair/target`, 1024 positions), with
rotary frequencies of a larger base, and goes on learning the next token of the same corpus in
sequences that grow from stage to stage: files of one directory, one after the other, a share of
them with planted repetitions (`long_data.py`). The tokenizer is the pair's, so the pair's draft can
draft for it.

    python examples/train_long.py              # train, then evaluate
    python examples/train_long.py --resume     # go on from the last checkpoint
    python examples/train_long.py --eval       # evaluate the target that is already there

The evaluation compares the loss on held-out tokens beyond position 4096 with that of the same
tokens after their last 512 tokens alone (`long_eval.py`).
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Spinning OpenMP workers would take time from whatever else runs on a small machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from long_data import Documents
from long_eval import evaluate, write_readme
from pair_data import load_corpus
from pair_parts import Optimizer, autocast, facts_of_training, save_pair, write_json
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

REPOSITORY = Path(__file__).resolve().parents[1]
PAIR = REPOSITORY / "examples" / "pair"


@dataclass(frozen=True)
class Stage:
    """One length of sequence, and for how long it is trained."""

    length: int
    minutes: float

    @classmethod
    def parse(cls, text: str) -> Stage:
        """Read LENGTH:MINUTES."""
        length, _, minutes = text.partition(":")
        try:
            stage = cls(int(length), float(minutes))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not LENGTH:MINUTES") from error
        if stage.length < 16 or stage.minutes <= 0:
            raise argparse.ArgumentTypeError(f"{text!r} has no length or no time")
        return stage


@dataclass
class Progress:
    """What a checkpoint holds beside weights and optimizer."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)


def begin(args: argparse.Namespace) -> Qwen3ForCausalLM:
    """The layers of the pair's target that are kept, with another base and more positions."""
    model = Qwen3ForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    layers = list(model.model.layers)
    model.model.layers = nn.ModuleList([layers[index] for index in args.layers])
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    config = model.config
    config.num_hidden_layers = len(args.layers)
    config.layer_types = ["full_attention"] * len(args.layers)
    config.max_position_embeddings = max(stage.length for stage in args.stages)
    config.rope_parameters = {"rope_type": "default", "rope_theta": args.theta}
    # Rotary frequencies are buffers that were computed from the configuration before this one.
    fresh = Qwen3ForCausalLM(config)
    fresh.load_state_dict(model.state_dict())
    fresh.generation_config.do_sample = False
    return fresh.train()


def scale_of(done: float) -> float:
    """Learning rate over its peak: warmup, a plateau, then a linear decay to a fiftieth."""
    return max(0.02, min(1.0, done / 0.02, (1.0 - done) / 0.6))


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: Optimizer, generator: torch.Generator, now: Progress
) -> None:
    temporary = path.with_suffix(".new")
    state = {
        "model": model.state_dict(),
        "optimizer": [part.state_dict() for part in optimizer.parts],
        "generator": generator.get_state(),
        "progress": asdict(now),
    }
    torch.save(state, temporary)
    temporary.replace(path)


def write_log(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ("length", "step", "tokens", "seconds", "loss", "planted"))
        writer.writeheader()
        writer.writerows(rows)


def train(args: argparse.Namespace) -> None:
    """Train and write the target, loss.csv and training.json."""
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.start)
    model = begin(args)
    tokenizer.model_max_length = model.config.max_position_embeddings
    documents = Documents.encode(tokenizer, load_corpus()[0])
    optimizer = Optimizer(model, args.muon_lr, args.adam_lr)
    now = Progress()
    checkpoint = args.work / "checkpoint.pt"
    if args.resume and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for part, saved in zip(optimizer.parts, state["optimizer"], strict=True):
            part.load_state_dict(saved)
        generator.set_state(state["generator"])
        now = Progress(**state["progress"])
    print(f"{model.num_parameters():,} parameters, {len(documents):,} tokens", flush=True)

    total = sum(stage.minutes for stage in args.stages) * 60
    last_save = now.seconds
    window: list[float] = []
    planted = 0
    while now.seconds < total:
        before = time.monotonic()
        stage, over = args.stages[0], 0.0
        for stage in args.stages:
            over += stage.minutes * 60
            if now.seconds < over:
                break
        rows = []
        for _ in range(max(1, args.batch_tokens // stage.length)):
            ids = documents.draw(stage.length + 1, generator)
            if torch.rand((), generator=generator) < args.planted:
                ids = documents.plant(ids, generator)
                planted += 1
            rows.append(ids)
        tokens = torch.stack(rows)
        with autocast():
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        del logits
        optimizer.step(scale_of(now.seconds / total))
        now.step += 1
        now.tokens += tokens[:, 1:].numel()
        now.seconds += time.monotonic() - before
        window.append(loss.item())
        if now.step % args.log_steps == 0:
            row = {
                "length": stage.length,
                "step": now.step,
                "tokens": now.tokens,
                "seconds": round(now.seconds),
                "loss": round(sum(window) / len(window), 4),
                "planted": planted,
            }
            window.clear()
            planted = 0
            now.rows.append(row)
            print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
            write_log(args.work / "loss.csv", now.rows)
        if now.seconds - last_save > 60 * args.save_minutes:
            last_save = now.seconds
            save_checkpoint(checkpoint, model, optimizer, generator, now)
            print(f"saved at {now.seconds / 60:.1f} of {total / 60:.0f} minutes", flush=True)
    save_checkpoint(checkpoint, model, optimizer, generator, now)
    save_pair({"target": model}, tokenizer, args.out)
    write_log(args.out / "loss.csv", now.rows)
    write_facts(args, len(documents), now)


def write_facts(args: argparse.Namespace, corpus: int, now: Progress) -> None:
    """Write training.json: how the target was made, for its README."""
    facts = {
        **facts_of_training("train_long.py", args.seed),
        "corpus_tokens": corpus,
        "layers": args.layers,
        "rope_theta": args.theta,
        "stages": [asdict(stage) for stage in args.stages],
        "planted_share": args.planted,
        "steps": now.step,
        "tokens_seen": now.tokens,
        "minutes": round(now.seconds / 60, 1),
    }
    write_json(args.out / "training.json", facts)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="example: python examples/train_long.py --stages 512:9 2048:13 8192:38",
    )
    add = parser.add_argument
    add("--out", type=Path, default=PAIR.parent / "long", help="folder of the target")
    add("--work", type=Path, default=REPOSITORY / "build/train-long", help="folder of checkpoints")
    add("--start", type=Path, default=PAIR / "target", help="model to begin with")
    add("--layers", type=int, nargs="+", default=[0, 1, 4, 6], help="layers of it that are kept")
    add("--theta", type=float, default=100000.0, help="base of the rotary frequencies")
    add(
        "--stages", type=Stage.parse, nargs="+", metavar="LENGTH:MINUTES",
        default=[Stage(512, 9), Stage(2048, 13), Stage(8192, 38)], help="lengths of sequences",
    )  # fmt: skip
    add("--planted", type=float, default=0.3, help="share of sequences with planted repetitions")
    add("--batch-tokens", type=int, default=4096, help="tokens of a step, one sequence at least")
    add("--muon-lr", type=float, default=0.01)
    add("--adam-lr", type=float, default=2e-3)
    add("--seed", type=int, default=20261123)
    add("--threads", type=int, default=1, help="torch threads")
    add("--log-steps", type=int, default=10, help="steps between rows of loss.csv")
    add("--save-minutes", type=float, default=3.0, help="minutes between checkpoints")
    add("--resume", action="store_true", help="go on from the checkpoint in --work")
    add("--eval", action="store_true", help="evaluate the target in --out and train nothing")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    args.out = args.out.resolve()
    if not args.eval:
        train(args)
    evaluate(args.out)
    write_readme(args.out)


if __name__ == "__main__":
    main()
