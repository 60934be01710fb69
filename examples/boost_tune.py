"""Boost-tuning: train one more draft on what the drafts before it get wrong (SpecInfer, §3).

Several drafts that are merged into one token tree help only where they differ. This script makes
the next draft of a list: it starts as a copy of the first one and is trained along the target's
greedy text (`pair_policy.py`), with the weight on the tokens that none of the drafts before it
would have proposed.

Which tokens those are. At every position of the pool the text before it is what the target wrote,
as it is on the accepted path of a step, and the target's choice y is known. A draft covers the
position if y is among its `--top-k` best tokens there (1: its greedy token, what a chain
proposes). Positions that no draft covers are missed: weight 1. The others have weight `--keep`: 0
trains on the missed ones alone, 1 is ordinary fine-tuning. Loss and optimizer are those of
`train_pair.py`; the weights are normalized over a batch.

SpecInfer drops whole samples, namely prompts at which a draft reproduces the target's
continuation. Here single positions count: of 144 tokens a small draft misses some in nearly every
sample, so that filter would drop next to nothing. And `--keep` is above 0: a chain reaches a token
that the others miss only by proposing the easy ones before it, and with weight k on the rest the
draft learns to turn away from a token t that the others propose where another one has more than k
times its probability, rather than everywhere.

The corpus is that of `train_pair.py`, less every file that holds one of the prompts to be measured.
What is written: the new draft, and with --json the figures that `boost_eval.py` measures.

    python examples/boost_tune.py                                  # the demo pair's second draft
    python examples/boost_tune.py --drafts A B --out C --minutes 12     # a third one
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# matrices this small gain nothing from a second thread, and lose where cores are shared
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from boost_eval import Contestants, measure, print_summary, write_report
from pair_data import encode_stream, read_prompts, training_files
from pair_parts import Schedule, save_pair
from pair_policy import BATCH, Pool, build_pool, train_on_policy
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from specc.compiler.tokenizer import TokenMap
from specc.errors import ConfigError, InputFileError, OutputError, SpeccError, VocabMismatchError
from specc.passes.frontend import hf_model
from specc.system.machine import check_threads

PAIR = Path(__file__).resolve().parent / "pair"
POOL_SHARE = 0.4  # of the minutes, for the target's text
POOL_BATCH = 64


@dataclass(frozen=True)
class Training:
    """How a draft was made, for the report."""

    pool_prompts: int
    pool_positions: int
    missed_share: float
    missed_share_of_continuations: float
    keep: float
    top_k: int
    seed: int
    learning_rates: list[float]
    steps: int
    control_steps: int | None
    pool_s: float
    boosted_s: float
    control_s: float | None


@torch.no_grad()
def covers(draft: PreTrainedModel, tokens: Tensor, choices: Tensor, top_k: int = 1) -> Tensor:
    """Where a draft proposes what the target chose.

    Args:
        draft: with the target's token map.
        tokens: [rows, length] text.
        choices: [rows, length] the target's next token after each position.
        top_k: how many of its best tokens the draft may propose.
    Returns:
        [rows, length] bool.
    """
    parts = []
    for text, choice in zip(tokens.split(BATCH), choices.split(BATCH), strict=True):
        best = draft(input_ids=text, use_cache=False).logits.topk(top_k).indices
        parts.append((best == choice[..., None]).any(-1))
    return torch.cat(parts)


def missed_positions(drafts: Sequence[PreTrainedModel], pool: Pool, top_k: int = 1) -> Tensor:
    """Positions of the pool, [rows, length] bool, whose next token no draft covers."""
    choices = pool.ids[..., 0].long()
    missed = torch.ones_like(choices, dtype=torch.bool)
    for number, draft in enumerate(drafts):
        start = time.monotonic()
        missed &= ~covers(draft, pool.tokens, choices, top_k)
        share, seconds = missed.float().mean(), time.monotonic() - start
        print(f"missed: {share:.1%} after draft {number}, {seconds:.0f} s", flush=True)
    return missed


def boost_weights(missed: Tensor, keep: float) -> Tensor:
    """Weights of the loss, float32: 1 where missed, else ``keep``."""
    return missed.float() + keep * (~missed).float()


def load_model(directory: Path) -> PreTrainedModel:
    """A model in float32, as the engine of the measurement runs it."""
    with hf_model.quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def tune(
    args: argparse.Namespace, target: Path, drafts: list[Path], scratch: Path
) -> tuple[Training, Path | None]:
    """Train and save the boosted draft, and in ``scratch`` the control; return its directory."""
    start = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(drafts[0])
    stream = encode_stream(tokenizer, training_files(args.prompts))
    newline = tokenizer("\n")["input_ids"][-1]
    schedule = Schedule(args.pool_batches, POOL_SHARE * args.minutes)
    pool = build_pool(load_model(target), stream, newline, POOL_BATCH, args.seed, schedule)
    pool_s = time.monotonic() - start
    print(f"pool: {pool.tokens.numel():,} positions in {pool_s:.0f} s", flush=True)
    missed = missed_positions([load_model(path) for path in drafts], pool, args.top_k)

    def fine_tune(out: Path, weights: Tensor | None, steps: int, share: float) -> tuple[int, float]:
        # a share of the minutes that are left, of which there may be none
        begin = time.monotonic()
        minutes = max(share * (args.minutes - (begin - start) / 60), 1e-6)

        def report(step: int, tokens: int, divergence: float) -> None:
            print(
                f"{out.name}: step {step}, {tokens:,} tokens, {time.monotonic() - begin:.0f} s,"
                f" divergence {divergence:.3f} nats",
                flush=True,
            )

        student = load_model(drafts[0]).train()
        schedule = Schedule(steps, minutes, warmup=20, decay=0.9)
        rates = (args.muon_rate, args.adam_rate)
        taken = train_on_policy(student, pool, args.seed + 1, schedule, report, weights, rates)
        if not taken:
            raise ConfigError(
                f"--minutes {args.minutes:g}, which ended before the first training step",
                "time for the target's text and for some hundred steps",
                "raise --minutes, or lower --pool-batches",
            )
        save_pair({out.name: student}, tokenizer, out.parent)
        for file in drafts[0].glob("tokenizer*"):
            # byte for byte: the library adds how it was loaded
            shutil.copyfile(file, out / file.name)
        print(f"{out.name}: {taken} steps", flush=True)
        return taken, time.monotonic() - begin

    weights = boost_weights(missed, args.keep)
    steps, boosted_s = fine_tune(args.out, weights, args.steps, 0.5 if args.control else 1.0)
    control, control_steps, control_s = None, None, None
    if args.control:
        control = scratch / "control"
        control_steps, control_s = fine_tune(control, None, steps, 1.0)
    training = Training(
        pool_prompts=len(pool.tokens),
        pool_positions=pool.tokens.numel(),
        missed_share=missed.float().mean().item(),
        missed_share_of_continuations=missed[:, pool.context - 1 :].float().mean().item(),
        keep=args.keep,
        top_k=args.top_k,
        seed=args.seed,
        learning_rates=[args.muon_rate, args.adam_rate],
        steps=steps,
        control_steps=control_steps,
        pool_s=pool_s,
        boosted_s=boosted_s,
        control_s=control_s,
    )
    return training, control


def check(args: argparse.Namespace) -> tuple[Path, list[Path]]:
    """Refuse what would fail later; return the directories of the target and of the drafts.

    Raises:
        SpeccError: a model is absent or has another token map, a file of prompts cannot be read,
            a number is out of range, or the output would replace something.
    """
    check_threads(args.threads)
    for option, value, least, most in (
        ("--keep", args.keep, 0.0, 1.0),
        ("--minutes", args.minutes, 0.01, 1e4),
        ("--steps", args.steps, 1, 10**9),
        ("--top-k", args.top_k, 1, 10**4),
        ("--depth", args.depth, 1, 64),
        ("--tokens", args.tokens, 2, 10**5),
        ("--pool-batches", args.pool_batches, 1, 10**9),
    ):
        if not least <= value <= most:
            raise ConfigError(f"{option} {value}", f"{least:g} … {most:g}", f"change {option}")
    target = hf_model.resolve_directory(args.target)
    drafts = [hf_model.resolve_directory(path) for path in args.drafts]
    target_map = TokenMap.from_file(target / "tokenizer.json")
    size = hf_model.load_config(target).vocab_size
    for path in drafts:
        target_map.require_same(TokenMap.from_file(path / "tokenizer.json"))
        own = hf_model.load_config(path).vocab_size
        if own < size:
            raise VocabMismatchError(
                f"{path}: {own} tokens, and {size} of the target",
                "a draft that has every token of the target",
                "choose a draft of the target's family",
            )
    for path in args.prompts:
        try:
            if not read_prompts(path):
                raise ValueError("no prompt")
            if any(not isinstance(entry["prompt"], str) for entry in read_prompts(path)):
                raise ValueError("a prompt that is no text")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputFileError(
                f"{path}: {error}", 'one {"prompt": "…"} a line', "pass --prompts FILE.jsonl"
            ) from error
    for path in [target, *drafts]:
        if path.resolve() == args.out.resolve():
            raise OutputError(
                f"--out {args.out}, which is read",
                "another directory than the target's and the drafts'",
                "choose another output",
            )
    if args.out.exists() and not (args.force and (args.out / "config.json").is_file()):
        raise OutputError(
            f"{args.out} exists{', and is no checkpoint' if args.force else ''}",
            "a path where nothing is, or with --force a checkpoint to replace",
            "choose another output, or pass --force to replace a draft",
        )
    return target, drafts


def run(args: argparse.Namespace) -> None:
    """Check, train, save, measure, report."""
    target, drafts = check(args)
    torch.set_num_threads(args.threads)
    args.out = args.out.resolve()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        training, control = tune(args, target, drafts, Path(scratch))
        contestants = Contestants(target, drafts, args.out, control)
        models = [load_model(path) for path in contestants.models]
        report = measure(
            contestants,
            args.prompts,
            args.depth,
            args.tokens,
            args.sampled,
            Path(scratch),
            lambda number, *rest: covers(models[number], *rest),
        )
    print_summary(report)
    if args.json:
        write_report(args.json, training, report, args.threads)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", default=PAIR / "target", help="checkpoint of the target")
    add("--drafts", nargs="+", default=[PAIR / "draft"], help="the drafts before, the first first")
    add("--out", type=Path, default=PAIR / "draft-boosted", help="directory of the new draft")
    add("--force", action="store_true", help="replace a draft at --out")
    add("--minutes", type=float, default=8.0, help="training time in all, the control's too")
    add("--threads", type=int, default=1, help="torch threads")
    add("--keep", type=float, default=0.1, help="weight of positions that a draft covers, 0 … 1")
    add("--top-k", type=int, default=1, help="tokens by which a draft covers a position")
    add("--steps", type=int, default=400, help="training steps, at most")
    add("--pool-batches", type=int, default=24, help=f"batches of {POOL_BATCH} prompts, at most")
    add("--muon-rate", type=float, default=0.01, help="peak learning rate of the matrices")
    add("--adam-rate", type=float, default=3e-3, help="peak learning rate of the rest")
    add("--seed", type=int, default=20261122)
    add(
        "--control",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also fine-tune a copy the ordinary way, for the same number of steps, to compare",
    )
    add(
        "--prompts",
        type=Path,
        nargs="+",
        default=[PAIR / "prompts.jsonl", PAIR / "prompts_unused.jsonl"],
        help="files of held-out prompts",
    )
    add("--depth", type=int, default=4, help="length of the chains that are measured")
    add("--tokens", type=int, default=128, help="output tokens of each prompt")
    add(
        "--sampled",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure at temperature 1 too, which takes twice as long as greedy decoding",
    )
    add("--json", type=Path, help="write the figures here too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the script; 0: done, 2: wrong input."""
    transformers_logging.disable_progress_bar()
    try:
        run(parse_args(argv))
    except SpeccError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
