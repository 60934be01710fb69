"""Corpus, tokenizer and prompts for the demo pair: the Python standard library's own source.

The corpus is whatever standard library the running interpreter has, so nothing is downloaded.
Files are split into training and held-out by a hash of their relative name, which makes the
split the same on every machine and independent of the order in which files are listed.
"""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
VOCAB_SIZE = 2048
HELD_OUT_ONE_IN = 16

# Test suites are repetitive, and the rest is generated tables or machine-specific data.
SKIPPED_PARTS = {
    "__pycache__", "dist-packages", "encodings", "idlelib", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip
SKIPPED_NAMES = ("_sysconfigdata", "__phello__", "entities.py", "_casefix.py", "this.py")

# A newline and an indent are tokens of their own, so text cut at a line end is tokenized as it
# was in training, and the layout of code costs the draft model next to nothing to predict.
PRE_TOKEN = r"\n| {2,}|\t+| ?[\p{L}_]+|\p{N}| ?[^\s\p{L}\p{N}_]+|\s"

_DEF = re.compile(r"^ *(?:def|class) \w+")


@dataclass(frozen=True)
class SourceFile:
    """One standard-library file: its name relative to the library, and its text."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def load_corpus() -> tuple[list[SourceFile], list[SourceFile]]:
    """Read the standard library; return its training files and its held-out files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_PARTS & set(relative.parts) or path.name.startswith(SKIPPED_NAMES):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            files.append(SourceFile(relative.as_posix(), text))
    train = [file for file in files if not file.held_out]
    return train, [file for file in files if file.held_out]


def train_tokenizer(files: list[SourceFile]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the training files. It never adds a token by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((file.text for file in files), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def encode_stream(tokenizer: PreTrainedTokenizerFast, files: list[SourceFile]) -> torch.Tensor:
    """Return all files as one stream of token ids, each file preceded by the end token."""
    ids: list[int] = []
    for file in files:
        ids.append(tokenizer.eos_token_id)
        ids.extend(tokenizer(file.text, verbose=False)["input_ids"])
    return torch.tensor(ids)


def find_prompts(
    tokenizer: PreTrainedTokenizerFast,
    files: list[SourceFile],
    per_file: int = 2,
    tokens: tuple[int, int] = (60, 200),
) -> list[dict[str, str]]:
    """Cut prompts that end after a ``def`` or ``class`` line and the first docstring line.

    A prompt starts early enough to reach the least token count, so it shows the code just
    before the definition too.
    """
    prompts = []
    for file in files:
        lines = file.text.splitlines(keepends=True)
        ends = [
            number + 2
            for number, line in enumerate(lines[:-4])
            if _DEF.match(line) and line.rstrip().endswith(":") and '"""' in lines[number + 1]
        ]
        # Spread the cuts over the file, so that two prompts of one file differ.
        for end in (ends[(i + 1) * len(ends) // (per_file + 1)] for i in range(per_file) if ends):
            start = end - 2
            while start > 0 and len(tokenizer("".join(lines[start:end]))["input_ids"]) < 80:
                start -= 1
            prompt = "".join(lines[start:end])
            length = len(tokenizer(prompt)["input_ids"])
            known = any(entry["prompt"] == prompt for entry in prompts)
            if tokens[0] <= length <= tokens[1] and not known:
                prompts.append({"prompt": prompt, "source": file.name})
    return prompts


def write_prompts(prompts: list[dict[str, str]], path: Path) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(entry) + "\n" for entry in prompts), encoding="utf-8")


def read_prompts(path: Path) -> list[dict[str, str]]:
    """Read what ``write_prompts`` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def training_files(prompt_files: Sequence[Path]) -> list[SourceFile]:
    """The corpus' training files that hold none of the prompts."""
    prompts = [entry["prompt"] for path in prompt_files for entry in read_prompts(path)]
    files = load_corpus()[0]
    kept = [file for file in files if not any(prompt in file.text for prompt in prompts)]
    print(f"corpus: {len(kept)} files, {len(files) - len(kept)} left out", flush=True)
    return kept
