"""Train a draft for the demo pair's target that has another tokenizer: Llama's kind, not GPT-2's.

The tokenizer is a BPE over characters as SentencePiece makes them: a space is the sign ▁, which
begins the word after it, the first word has one, too, and a character without a piece becomes
pieces of one byte, `<0xE4>`. It has `<unk>`, `<s>` and `</s>`, and learns its merges from the files
that the pair learned from (`pair_data.py`). The draft is a Llama of the size of the pair's draft.
It learns the next token of that text in its own tokens, as a model of another family does, and
nothing from the target: `examples/pair/draft-llama`.

    python examples/train_other_vocabulary.py --minutes 18
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

# matrices this small gain nothing from a second thread, and lose where cores are shared
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from pair_data import SourceFile, load_corpus
from pair_parts import (
    SEQUENCE,
    Optimizer,
    Schedule,
    autocast,
    facts_of_training,
    held_out_loss,
    save_pair,
    write_json,
)
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAIR = Path(__file__).resolve().parent / "pair"
NAME = "draft-llama"
VOCAB_SIZE = 2048
BATCH_TOKENS = 4096
UNK, BOS, EOS = "<unk>", "<s>", "</s>"
SPACE = "▁"
# characters that are pieces by themselves; the rest is bytes
ALPHABET = 96
# where SentencePiece lets no piece reach over: words begin with a space, scripts and digits do not
# mix, and of a run of spaces the last one belongs to the word after it
WORDS = (
    rf"\n|{SPACE}+(?={SPACE})|{SPACE}?\p{{L}}+|{SPACE}?\p{{N}}"
    rf"|{SPACE}?[^\s\p{{L}}\p{{N}}{SPACE}]+|{SPACE}|\s"
)


def train_tokenizer(files: list[SourceFile]) -> PreTrainedTokenizerFast:
    """Train merges on the files, and put the pieces of bytes before them, as Llama has them."""
    special = [UNK, BOS, EOS]
    single_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    parts = _parts(Tokenizer(models.BPE()))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(special) - len(single_bytes),
        limit_alphabet=ALPHABET,
        show_progress=False,
    )
    parts.train_from_iterator((file.text for file in files), trainer)
    merged = parts.get_vocab()
    pieces = [*special, *single_bytes, *sorted(merged, key=merged.__getitem__)]
    model = models.BPE(
        {piece: index for index, piece in enumerate(pieces)},
        _merges(parts),
        unk_token=UNK,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = _parts(Tokenizer(model))
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, pieces.index(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNK,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def _parts(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """The library gives merges in files alone."""
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def encode_files(tokenizer: PreTrainedTokenizerFast, files: list[SourceFile]) -> Tensor:
    """All files as one stream of token ids; each begins with `<s>` and ends with `</s>`."""
    ids: list[int] = []
    for file in files:
        ids.extend(tokenizer(file.text, verbose=False)["input_ids"])
        ids.append(tokenizer.eos_token_id)
    return torch.tensor(ids)


def build_draft(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama as small as the pair's draft, with random weights."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        intermediate_size=384,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.do_sample = False
    return model


def train_draft(draft: LlamaForCausalLM, stream: Tensor, minutes: float, seed: int) -> int:
    """Learn the next token of the stream; returns the steps taken."""
    optimizer = Optimizer(draft, 0.02, 6e-3)
    generator = torch.Generator().manual_seed(seed)
    schedule = Schedule(10**6, minutes)
    step = 0
    while schedule.progress(step) < 1.0:
        count = BATCH_TOKENS // SEQUENCE
        starts = torch.randint(len(stream) - SEQUENCE - 1, (count,), generator=generator)
        tokens = torch.stack([stream[s : s + SEQUENCE + 1] for s in starts])
        with autocast():
            logits = draft(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step(schedule.scale(step))
        step += 1
        if step % 20 == 0:
            seconds = time.monotonic() - schedule.start
            print(f"step {step}, {seconds:.0f} s, loss {loss.item():.3f}", flush=True)
    return step


def make_draft(args: argparse.Namespace) -> dict[str, Any]:
    """Train tokenizer and draft; returns how."""
    train_files, held_out_files = load_corpus()
    tokenizer = train_tokenizer(train_files)
    stream, held_out = (encode_files(tokenizer, files) for files in (train_files, held_out_files))
    draft = build_draft(tokenizer)
    print(f"{draft.num_parameters():,} parameters, {len(stream):,} tokens", flush=True)
    steps = train_draft(draft, stream, args.minutes, args.seed)
    save_pair({NAME: draft}, tokenizer, args.out)
    return {
        "corpus_tokens": len(stream),
        "held_out_tokens": len(held_out),
        "steps": steps,
        "tokens_seen": steps * BATCH_TOKENS,
        "held_out_loss": round(held_out_loss(draft, held_out), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=PAIR, help="folder that gets the draft")
    add("--minutes", type=float, default=15.0, help="minutes of training")
    add("--seed", type=int, default=20261126)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    facts = facts_of_training("train_other_vocabulary.py", args.seed)
    facts |= make_draft(args)
    write_json(args.out / NAME / "training.json", facts)
    print(facts, flush=True)


if __name__ == "__main__":
    main()
