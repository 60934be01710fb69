"""What the trainers of drafts that read hidden states share: options, lessons and a report."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from head_files import load_weights
from head_loop import Course
from head_prompts import prompts_apart
from head_texts import Texts, continue_texts, load_texts, read_texts, save_texts
from pair_data import encode_stream, load_corpus, read_prompts, training_files
from pair_parts import Schedule, facts_of_training, write_json
from pair_policy import draw_prompts
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

PAIR = Path(__file__).resolve().parents[1] / "pair"
PROMPTS = {"held out": PAIR / "prompts.jsonl", "unused": PAIR / "prompts_unused.jsonl"}
CONTINUATION = 160  # tokens that the target adds to a prompt
WINDOW = 512  # tokens of a window of the corpus
POOL_BATCH = 128  # prompts that are continued at once
NEW_TOKENS = 128  # of an output that is walked along


def add_options(
    parser: argparse.ArgumentParser, out: Path, minutes: float, seed: int
) -> Callable[..., Any]:
    """Options of both trainers; returns what adds another one.

    Args:
        parser: of a command line.
        out: where the draft is written, unless the command says otherwise.
        minutes: of training, likewise.
        seed: of all that is drawn, likewise.
    """
    add = parser.add_argument
    add("--target", type=Path, default=PAIR / "target")
    add("--out", type=Path, default=out, help="directory that is written")
    add("--start", type=Path, help="one of the same sizes to go on with")
    add("--texts", type=Path, help="file that keeps the texts, or has them from an earlier run")
    add("--pool-batches", type=int, default=16, help=f"of {POOL_BATCH} prompts, greedy texts")
    add("--sampled-batches", type=int, default=16, help="the same, sampled texts")
    add("--windows", type=int, default=1024, help="windows of the corpus")
    add("--minutes", type=float, default=minutes, help="minutes of training, at most")
    add("--steps", type=int, default=10**6, help="steps of training, at most")
    add("--boundaries", type=int, nargs="+", default=[2, 5, 7], help="b: what enters layer b")
    add("--first-weight", type=float, default=1.0, help="of the target's choice, greedy texts")
    add("--missed-weight", type=float, default=0.3, help="of rows that a chain does not reach")
    add(
        "--shares",
        type=float,
        nargs=3,
        default=[1.0, 1.0, 1.0],
        help="how often a token of greedy texts, sampled ones and the corpus is drawn",
    )
    add("--heads", type=int, default=2)
    add("--kv-heads", type=int, default=1)
    add("--head-dim", type=int, default=64)
    add("--muon-rate", type=float, default=0.02, help="peak learning rate of the matrices")
    add("--adam-rate", type=float, default=4e-3, help="peak learning rate of the rest")
    add("--seed", type=int, default=seed)
    return add


def course_of(args: argparse.Namespace) -> Course:
    """How the options have a draft taught; its time begins now."""
    schedule = Schedule(args.steps, args.minutes, decay=0.7)
    return Course(schedule, (args.muon_rate, args.adam_rate), args.shares, args.seed + 3)


def run(
    script: str, args: argparse.Namespace, make: Callable[[argparse.Namespace], dict[str, Any]]
) -> None:
    """Train, and write beside the weights how.

    Args:
        script: its name.
        args: of the command line.
        make: trains and saves; returns facts.
    """
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    facts = facts_of_training(script, args.seed)
    facts["transformers"] = transformers.__version__
    if args.start:
        # of a run that was ended, weights alone are there
        before = args.start / "eval.json"
        facts["start"] = (
            json.loads(before.read_text(encoding="utf-8")) if before.is_file() else str(args.start)
        )
    facts |= make(args)
    write_json(args.out / "eval.json", facts)
    print(facts, flush=True)


@dataclass(frozen=True)
class Lessons:
    """What a draft learns from.

    Args:
        target: in float32.
        tokenizer: of it.
        shelves: greedy texts, sampled ones and windows of the corpus.
        prompts: of walks, see `prompts_of_walks`.
    """

    target: PreTrainedModel
    tokenizer: Any
    shelves: list[Texts]
    prompts: dict[str, list[dict[str, str]]]

    @classmethod
    def find(cls, args: argparse.Namespace) -> Lessons:
        """Those of an earlier run, or made now."""
        tokenizer = AutoTokenizer.from_pretrained(args.target)
        # what is wrong with them is said before anything is learned
        prompts = prompts_of_walks(tokenizer)
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
        if args.texts and args.texts.is_file():
            return cls(target, tokenizer, load_texts(args.texts), prompts)
        stream = encode_stream(tokenizer, training_files([*PROMPTS.values()]))
        shelves = make_shelves(args, target, stream, tokenizer("\n")["input_ids"][-1])
        if args.texts:
            save_texts(shelves, args.texts)
        return cls(target, tokenizer, shelves, prompts)

    @property
    def output(self) -> Tensor:
        """[V, H] bfloat16, the target's head."""
        return self.target.get_output_embeddings().weight.detach().bfloat16()

    def begin(self, draft: nn.Module, start: Path | None) -> None:
        """Go on where an earlier run ended, if there is one, and say what is there."""
        if start:
            load_weights(draft, start)
        sizes = self.sizes(draft)
        count = sum(sizes["tokens_of_texts"].values())
        print(f"{sizes['parameters']:,} parameters, {count:,} tokens", flush=True)

    def sizes(self, draft: nn.Module) -> dict[str, Any]:
        """Of a draft and of the texts, for a report."""
        tokens = [texts.tokens.numel() for texts in self.shelves]
        return {
            "parameters": sum(x.numel() for x in draft.parameters()),
            "tokens_of_texts": dict(zip(("greedy", "sampled", "corpus"), tokens, strict=True)),
        }

    def greedy(self, boundaries: list[int]) -> dict[str, list[Texts]]:
        """The target's greedy output after each prompt of walks."""
        return {
            name: greedy_texts(self.target, self.tokenizer, entries, boundaries)
            for name, entries in self.prompts.items()
        }


def prompts_of_walks(tokenizer: Any) -> dict[str, list[dict[str, str]]]:
    """Prompts of the two files, and others to compare settings and runs by, `validation`.

    So the files' prompts need have no part in a choice.
    """
    prompts = {name: read_prompts(path) for name, path in PROMPTS.items()}
    known = [entry for entries in prompts.values() for entry in entries]
    return prompts | {"validation": prompts_apart(tokenizer, load_corpus()[1], known)}


def make_shelves(
    args: argparse.Namespace, target: PreTrainedModel, stream: Tensor, newline: int
) -> list[Texts]:
    """Texts to learn from: greedy ones, sampled ones, and windows of the corpus."""
    generator = torch.Generator().manual_seed(args.seed + 1)
    torch.manual_seed(args.seed + 2)
    begin, shelves = time.monotonic(), []
    for temperature, batches in ((0.0, args.pool_batches), (1.0, args.sampled_batches)):
        pool = []
        for number in range(batches):
            prompts = draw_prompts(stream, newline, POOL_BATCH, generator)
            pool.append(continue_texts(target, prompts, CONTINUATION, temperature))
            print(f"texts: {number + 1}, {time.monotonic() - begin:.0f} s", flush=True)
        context = pool[0].shape[1] - CONTINUATION
        shelves.append(read_texts(target, torch.cat(pool), args.boundaries, context))
    starts = torch.randint(len(stream) - WINDOW, (args.windows,), generator=generator)
    windows = torch.stack([stream[start : start + WINDOW] for start in starts])
    return [*shelves, read_texts(target, windows, args.boundaries, WINDOW)]


def greedy_texts(
    target: PreTrainedModel, tokenizer: Any, entries: list[dict[str, str]], boundaries: list[int]
) -> list[Texts]:
    """The target's greedy output after each prompt."""
    prompts = [tokenizer(entry["prompt"])["input_ids"] for entry in entries]
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    outputs = continue_texts(target, padded, NEW_TOKENS, 0.0, seen)
    return [
        # as exact as an engine
        read_texts(target, row[None, skip:], boundaries, longest - skip, torch.float32)
        for row, skip in zip(outputs, (longest - len(prompt) for prompt in prompts), strict=True)
    ]
