"""Train the demo pair: a small Qwen3 target and a draft an eighth of its size, on two CPU cores.

Both models learn from the Python standard library's own source, in three stages:

1. joint      the target learns the next token; in the same loop the draft learns, by KL, the
              distribution that the target has just computed, so its teacher costs nothing extra.
2. loops      the target continues prompts greedily and unlearns, by an unlikelihood loss, the
              tokens that repeat a 4-gram of its own text, while it goes on learning the corpus.
              Without this, greedy text of so small a model mostly loops.
3. on-policy  the target, rounded to bf16 as it ships, greedily continues prompts from training
              files, and the draft learns to follow it there. Greedy speculative decoding only
              ever visits the target's own greedy text, so this is where agreement pays.

    python examples/training/train_pair.py              # train, then evaluate
    python examples/training/train_pair.py --eval       # evaluate the pair that is already there
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from pathlib import Path

# Spinning OpenMP workers would take time from whatever else runs on a small machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from pair_data import (
    encode_stream,
    find_prompts,
    load_corpus,
    train_tokenizer,
    write_prompts,
)
from pair_eval import PANELS, evaluate_pair, plot_loss, read_losses, write_readme
from pair_parts import (
    SEQUENCE,
    LossLog,
    build_model,
    facts_of_training,
    held_out_loss,
    save_pair,
    write_json,
)
from pair_policy import CONTEXT, build_pool, continue_greedily, draw_prompts, train_on_policy
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from specc.fit.optimizer import Optimizer, Schedule, autocast

BATCH_TOKENS = 4096


def joint_losses(
    target: Qwen3ForCausalLM, draft: Qwen3ForCausalLM, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the target's next-token loss and the KL from the target to the draft."""
    with autocast():
        teacher, student = (
            model(input_ids=tokens[:, :-1], use_cache=False).logits.float().flatten(0, 1)
            for model in (target, draft)
        )
    loss = F.cross_entropy(teacher, tokens[:, 1:].flatten())
    kl = F.kl_div(
        student.log_softmax(-1),
        teacher.detach().log_softmax(-1),
        log_target=True,
        reduction="batchmean",
    )
    return loss, kl


def train_jointly(
    models: dict[str, Qwen3ForCausalLM],
    streams: tuple[Tensor, Tensor],
    args: argparse.Namespace,
    log: LossLog,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Train the target on the corpus, and the draft on the target's distribution."""
    target, draft = models["target"], models["draft"]
    # Two lengths of window: the short one is faster, and the long one, at the end, covers the
    # positions up to the limit in the configuration. Only the short one is worth compiling.
    losses = torch.compile(joint_losses) if args.compile else joint_losses
    optimizers = [Optimizer(target, 0.02, 4e-3), Optimizer(draft, 0.02, 6e-3)]
    train, held_out = streams
    generator = torch.Generator().manual_seed(args.seed)
    schedule = Schedule(args.joint_steps, args.joint_minutes)
    step, saved = 0, time.monotonic()
    while schedule.progress(step) < 1.0:
        long = schedule.progress(step) > 0.92
        length = 2 * SEQUENCE if long else SEQUENCE
        starts = torch.randint(
            len(train) - length - 1, (BATCH_TOKENS // length,), generator=generator
        )
        tokens = torch.stack([train[s : s + length + 1] for s in starts])
        loss, kl = (joint_losses if long else losses)(target, draft, tokens)
        (loss + kl).backward()  # the two losses share no parameter
        for optimizer in optimizers:
            optimizer.step(schedule.scale(step))
        step += 1
        if step % 20 == 0:
            log.add("joint", step, step * BATCH_TOKENS, target_loss=loss.item(), draft_kl=kl.item())
        if time.monotonic() - saved > 60 * args.save_minutes:
            saved = time.monotonic()
            save_pair(models, tokenizer, args.out)
    value = held_out_loss(target, held_out)
    log.add("joint", step, step * BATCH_TOKENS, held_out_loss=value)


def repeats(tokens: Tensor, n: int = 4) -> Tensor:
    """Mark every generated token that completes an n-gram seen earlier in its row."""
    marks = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, mark in zip(tokens.tolist(), marks, strict=True):
        seen = set()
        for i in range(n - 1, len(row)):
            gram = tuple(row[i - n + 1 : i + 1])
            mark[i] = gram in seen and i >= CONTEXT
            seen.add(gram)
    return marks


def unlearn_loops(
    target: Qwen3ForCausalLM,
    streams: tuple[Tensor, Tensor],
    newline: int,
    args: argparse.Namespace,
    log: LossLog,
) -> None:
    """Fine-tune the target so that its greedy text repeats itself less.

    The result is blended with the target as it was: a point between the two keeps most of what
    each is good at, the repetition of the tuned one and the loss of the other.
    """
    before = {name: value.clone() for name, value in target.state_dict().items()}
    stream, held_out = streams
    optimizer = Optimizer(target, 0.005, 1e-3)
    generator = torch.Generator().manual_seed(args.seed + 3)
    schedule = Schedule(args.loop_steps, args.loop_minutes, warmup=5, decay=0.6)
    step, rows, group = 0, 8, 96
    while schedule.progress(step) < 1.0:
        # Fresh text for every few steps: once one loop is unlearned the target finds another.
        teacher = copy.deepcopy(target).to(torch.bfloat16)
        pool = continue_greedily(teacher, draw_prompts(stream, newline, group, generator)).tokens
        marks = repeats(pool)
        share = marks[:, CONTEXT:].float().mean().item()
        for text, mark in zip(pool.split(rows), marks.split(rows), strict=True):
            starts = torch.randint(len(stream) - SEQUENCE - 1, (4,), generator=generator)
            tokens = torch.stack([stream[s : s + SEQUENCE + 1] for s in starts])
            with autocast():
                logits = target(input_ids=tokens[:, :-1], use_cache=False).logits
                own = target(input_ids=text[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            odds = own.float().softmax(-1).gather(-1, text[:, 1:, None])[..., 0]
            unlikely = -(1 - odds).clamp_min(1e-4).log()[mark[:, 1:]].sum() / mark.sum().clamp_min(
                1
            )
            (loss + args.loop_weight * unlikely).backward()
            optimizer.step(max(0.0, schedule.scale(step)))
            step += 1
        log.add("loops", step, step * 4 * SEQUENCE, target_loss=loss.item(), repeated=share)
    tuned = target.state_dict()
    target.load_state_dict(
        {name: torch.lerp(value, tuned[name], args.loop_blend) for name, value in before.items()}
    )
    log.add("loops", step, step * 4 * SEQUENCE, held_out_loss=held_out_loss(target, held_out))


def write_facts(args: argparse.Namespace, train: Tensor, held_out: Tensor) -> None:
    """Write training.json: how the pair was made, for its README."""
    facts = {
        **facts_of_training("train_pair.py", args.seed),
        "corpus_tokens": len(train),
        "held_out_tokens": len(held_out),
    }
    write_json(args.out / "training.json", facts)


def train(args: argparse.Namespace) -> None:
    """Train both models and write everything but the evaluation."""
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    train_files, held_out_files = load_corpus()
    tokenizer = train_tokenizer(train_files)
    write_prompts(find_prompts(tokenizer, held_out_files), args.out / "prompts.jsonl")
    streams = (encode_stream(tokenizer, train_files), encode_stream(tokenizer, held_out_files))
    end = tokenizer.eos_token_id
    models = {
        "target": build_model(256, 8, heads=4, kv_heads=2, intermediate=768, end=end),
        "draft": build_model(128, 3, heads=2, kv_heads=1, intermediate=384, end=end),
    }
    for name, model in models.items():
        print(f"{name}: {model.num_parameters():,} parameters", flush=True)
    print(f"training tokens: {len(streams[0]):,}, held out: {len(streams[1]):,}", flush=True)

    # the stage that is skipped
    rows = read_losses(args.out) if args.resume else []
    log = LossLog(args.out / "loss.csv", [row for row in rows if row["stage"] == "joint"])
    newline = tokenizer("\n")["input_ids"][0]
    if args.resume:
        models = {
            name: Qwen3ForCausalLM.from_pretrained(args.out / name, dtype=torch.float32).train()
            for name in models
        }
    else:
        train_jointly(models, streams, args, log, tokenizer)
    unlearn_loops(models["target"], streams, newline, args, log)
    save_pair(models, tokenizer, args.out)

    target = Qwen3ForCausalLM.from_pretrained(args.out / "target", dtype=torch.bfloat16).eval()
    schedule = Schedule(args.pool_batches, args.pool_minutes)
    pool = build_pool(target, streams[0], newline, args.pool_batch, args.seed + 1, schedule)
    train_on_policy(
        models["draft"],
        pool,
        args.seed + 2,
        Schedule(args.policy_steps, args.policy_minutes, warmup=20, decay=0.9),
        lambda step, seen, kl: log.add("on-policy", step, seen, draft_kl=kl),
        use_compile=args.compile,
    )
    save_pair({"draft": models["draft"]}, tokenizer, args.out)
    write_facts(args, *streams)
    plot_loss(args.out, PANELS)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default_out = Path(__file__).resolve().parents[1] / "pair"
    add = parser.add_argument
    add("--out", type=Path, default=default_out, help="folder of the pair")
    add("--eval", action="store_true", help="evaluate the pair in --out and train nothing")
    add("--seed", type=int, default=20261120)
    add("--threads", type=int, default=2, help="torch threads")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="use torch.compile")
    add("--joint-steps", type=int, default=2200, help="steps of the first stage, at most")
    add("--joint-minutes", type=float, default=42.0, help="minutes of the first stage, at most")
    add("--resume", action="store_true", help="skip the first stage, start from the pair in --out")
    add("--loop-steps", type=int, default=360, help="steps of the loops stage, at most")
    add("--loop-minutes", type=float, default=8.0, help="minutes of the loops stage, at most")
    add("--loop-weight", type=float, default=1.0, help="weight of the unlikelihood loss")
    add("--loop-blend", type=float, default=0.6, help="share of the tuned weights that is kept")
    add("--pool-batches", type=int, default=60, help="batches of greedy text, at most")
    add("--pool-batch", type=int, default=128, help="prompts in such a batch")
    add("--pool-minutes", type=float, default=8.0, help="minutes spent on it, at most")
    add("--policy-steps", type=int, default=1200, help="steps of the on-policy stage, at most")
    add("--policy-minutes", type=float, default=8.0, help="minutes of the on-policy stage, at most")
    add("--save-minutes", type=float, default=8.0, help="minutes between saves of the pair")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    args.out = args.out.resolve()
    if not args.eval:
        train(args)
    evaluate_pair(args.out)
    write_readme(args.out)


if __name__ == "__main__":
    main()
