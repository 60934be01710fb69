"""Train a small hybrid target: layers that keep a state and full attention, on one CPU core.

It has the tokenizer and the corpus of the demo pair (`train_pair.py`), begins with parts of the
pair's target (`hybrid_model.py`), and learns in two stages:

1. corpus  the next token, and the distribution that the pair's target computes of it.
2. policy  that distribution along the greedy text of the pair's target, where the pair's draft has
           learned to follow it, too: so that the draft is a usable one of the hybrid.

    python examples/training/train_hybrid.py          # train, or go on with it, then evaluate
    python examples/training/train_hybrid.py --eval   # evaluate the hybrid that is already there

A run that was ended goes on from `--work`, where all of its state is kept every few minutes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import Any

# Spinning OpenMP workers would take time from whatever else runs on a small machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from delta_rule import fast_delta_rule
from hybrid_eval import evaluate_hybrid, plot_hybrid_loss, write_hybrid_readme
from hybrid_model import build_hybrid
from pair_data import encode_stream, load_corpus, training_files
from pair_eval import read_losses
from pair_parts import (
    SEQUENCE,
    LossLog,
    facts_of_training,
    held_out_loss,
    save_pair,
    write_json,
)
from pair_policy import build_pool, train_on_policy
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, Qwen3ForCausalLM

from specc.fit.optimizer import Optimizer, Schedule, autocast

EXAMPLES = Path(__file__).resolve().parents[1]
WORK = EXAMPLES.parent / "out" / "train-hybrid"
PAIR = EXAMPLES / "pair"
BATCH_TOKENS = 4096
PART_TOKENS = 2048  # of a backward pass: what it reads again stays in the processor's caches
LOSSES = ("loss", "teacher_kl", "held_out_loss")


def losses(hybrid: PreTrainedModel, teacher: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, ...]:
    """Of texts [rows, n + 1]: the next-token loss, and the divergence from the teacher, nats."""
    with torch.no_grad(), autocast():
        taught = teacher(input_ids=tokens[:, :-1], use_cache=False).logits
    with autocast():
        logits = hybrid(input_ids=tokens[:, :-1], use_cache=False).logits
    own, other = (x.float().flatten(0, 1).log_softmax(-1) for x in (logits, taught))
    kl = F.kl_div(own, other, log_target=True, reduction="batchmean")
    return F.nll_loss(own, tokens[:, 1:].flatten()), kl


class CorpusStage:
    """The first stage: all of its state, which `keep` writes and `go_on` reads.

    Args:
        hybrid: in float32, learns in place.
        teacher: of the same vocabulary.
        stream: [tokens] int64 of the corpus.
        args: of the command line.
        file: holds the state of a run.
    """

    def __init__(
        self,
        hybrid: PreTrainedModel,
        teacher: PreTrainedModel,
        stream: Tensor,
        args: argparse.Namespace,
        file: Path,
    ) -> None:
        self.hybrid, self._teacher, self._stream, self._file = hybrid, teacher, stream, file
        self._kl_share = args.kl_share
        self._optimizer = Optimizer(hybrid, args.muon_rate, args.adam_rate)
        self._generator = torch.Generator().manual_seed(args.seed)
        self.schedule = Schedule(args.steps, args.minutes)
        self.step = 0

    def keep(self) -> None:
        """Write the state, whole or not at all."""
        state = {
            "hybrid": self.hybrid.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "generator": self._generator.get_state(),
            "step": self.step,
            "seconds": self.schedule.elapsed(),
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._file.with_suffix(".part")
        torch.save(state, temporary)
        temporary.replace(self._file)

    def go_on(self) -> None:
        """Take the state of a run that was ended, if there is one."""
        if not self._file.exists():
            return
        state = torch.load(self._file, weights_only=True)
        self.hybrid.load_state_dict(state["hybrid"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"])
        self.step = state["step"]
        self.schedule.begin_before(state["seconds"])

    @property
    def is_over(self) -> bool:
        return self.schedule.progress(self.step) >= 1.0

    def learn(self) -> tuple[float, float]:
        """Take a step; returns both losses."""
        # the positions up to the limit in the configuration come last
        is_long = self.schedule.progress(self.step) > 0.92
        length = min(2 * SEQUENCE if is_long else SEQUENCE, len(self._stream) - 2)
        count = max(1, BATCH_TOKENS // length)
        starts = torch.randint(len(self._stream) - length - 1, (count,), generator=self._generator)
        tokens = torch.stack([self._stream[start : start + length + 1] for start in starts])
        sums = torch.zeros(2)
        for part in tokens.split(max(1, PART_TOKENS // length)):
            loss, kl = losses(self.hybrid, self._teacher, part)
            share = len(part) / count
            (share * torch.lerp(loss, kl, self._kl_share)).backward()
            sums += share * torch.stack([loss.detach(), kl.detach()])
        self._optimizer.step(max(0.0, self.schedule.scale(self.step)))
        self.step += 1
        return sums[0].item(), sums[1].item()


def save_hybrid(hybrid: PreTrainedModel, tokenizer: Any, out: Path) -> None:
    """Save a bf16 copy, with the files of the pair's tokenizer as they are."""
    save_pair({"target": hybrid}, tokenizer, out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(PAIR / "target" / name, out / "target" / name)


def train(args: argparse.Namespace) -> None:
    """Train the hybrid and write everything but the evaluation."""
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    teacher = Qwen3ForCausalLM.from_pretrained(PAIR / "target", dtype=torch.bfloat16).eval()
    files = training_files([PAIR / "prompts.jsonl", PAIR / "prompts_unused.jsonl"])
    stream, held_out = (encode_stream(tokenizer, own) for own in (files, load_corpus()[1]))
    hybrid = build_hybrid(teacher.float()).train()
    teacher.bfloat16()
    print(f"{hybrid.num_parameters():,} parameters, {len(stream):,} tokens", flush=True)

    stage = CorpusStage(hybrid, teacher, stream, args, args.work / "corpus.pt")
    stage.go_on()
    rows = read_losses(args.out) if stage.step else []
    rows = [row for row in rows if row["stage"] == "corpus" and int(row["step"]) <= stage.step]
    log = LossLog(args.out / "loss.csv", rows, LOSSES)
    saved = time.monotonic()
    while not stage.is_over:
        loss, kl = stage.learn()
        if stage.step % 10 == 0:
            log.add("corpus", stage.step, stage.step * BATCH_TOKENS, loss=loss, teacher_kl=kl)
        if time.monotonic() > saved + 60 * args.save_minutes:
            saved = time.monotonic()
            stage.keep()
            save_hybrid(hybrid, tokenizer, args.out)
    stage.keep()
    save_hybrid(hybrid, tokenizer, args.out)
    value = held_out_loss(hybrid, held_out)
    log.add("corpus", stage.step, stage.step * BATCH_TOKENS, held_out_loss=value)

    newline = tokenizer("\n")["input_ids"][0]
    schedule = Schedule(args.pool_batches, args.pool_minutes)
    pool = build_pool(teacher, stream, newline, args.pool_batch, args.seed + 1, schedule)
    steps = train_on_policy(
        hybrid,
        pool,
        args.seed + 2,
        Schedule(args.policy_steps, args.policy_minutes, warmup=20, decay=0.9),
        lambda step, seen, kl: log.add("policy", step, seen, teacher_kl=kl),
        rates=(0.5 * args.muon_rate, 0.5 * args.adam_rate),
    )
    value = held_out_loss(hybrid, held_out)
    log.add("policy", steps, steps * 32 * pool.tokens.shape[1], held_out_loss=value)
    save_hybrid(hybrid, tokenizer, args.out)
    write_json(args.out / "training.json", facts(args, stream, held_out, pool.tokens))
    plot_hybrid_loss(args.out)


def facts(
    args: argparse.Namespace, stream: Tensor, held_out: Tensor, pool: Tensor
) -> dict[str, Any]:
    """How the hybrid was made, for its README."""
    return {
        **facts_of_training("train_hybrid.py", args.seed),
        "corpus_tokens": len(stream),
        "held_out_tokens": len(held_out),
        "pool_tokens": pool.numel(),
        "settings": {
            "kl_share": args.kl_share,
            "rates": [args.muon_rate, args.adam_rate],
            "batch_tokens": BATCH_TOKENS,
        },
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=EXAMPLES / "hybrid", help="folder of the hybrid")
    add("--work", type=Path, default=WORK, help="state of a run")
    add("--eval", action="store_true", help="evaluate the hybrid in --out and train nothing")
    add("--seed", type=int, default=20261129)
    add("--threads", type=int, default=1, help="torch threads")
    add("--steps", type=int, default=1400, help="steps of the first stage, at most")
    add("--minutes", type=float, default=30.0, help="minutes of the first stage, at most")
    add("--kl-share", type=float, default=0.5, help="of the teacher in the first stage's loss")
    add("--muon-rate", type=float, default=0.01, help="peak learning rate of the matrices")
    add("--adam-rate", type=float, default=3e-3, help="peak learning rate of the rest")
    add("--pool-batches", type=int, default=10, help="batches of greedy text, at most")
    add("--pool-batch", type=int, default=128, help="prompts in such a batch")
    add("--pool-minutes", type=float, default=4.0, help="minutes spent on it, at most")
    add("--policy-steps", type=int, default=160, help="steps of the second stage, at most")
    add("--policy-minutes", type=float, default=8.0, help="minutes of the second stage, at most")
    add("--save-minutes", type=float, default=3.0, help="minutes between saves")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    args.out, args.work = args.out.resolve(), args.work.resolve()
    if not args.eval:
        with fast_delta_rule():
            train(args)
    evaluate_hybrid(args.out, PAIR)
    write_hybrid_readme(args.out)


if __name__ == "__main__":
    main()
