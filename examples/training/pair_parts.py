"""Parts that the stages of ``train_pair.py`` share: models, losses and log."""

from __future__ import annotations

import copy
import csv
import datetime
import json
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pair_data import VOCAB_SIZE
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specc.fit.optimizer import autocast

SEQUENCE = 512
LOSSES = ("target_loss", "draft_kl", "held_out_loss", "repeated")


class LossLog:
    """Rows of loss.csv: kept in memory, rewritten whole at each flush.

    Args:
        path: of the file.
        rows: of an earlier run, which are kept; time counts on from the last of them.
        losses: names of what is logged.
    """

    def __init__(
        self, path: Path, rows: Sequence[Mapping[str, str]] = (), losses: Sequence[str] = LOSSES
    ) -> None:
        self.path = path
        self.fields = ("stage", "step", "tokens", "seconds", *losses)
        self.rows: list[dict[str, str | int | float]] = [dict(row) for row in rows]
        self.start = time.monotonic()
        if rows:
            self.start -= float(rows[-1]["seconds"])

    def add(self, stage: str, step: int, tokens: int, **losses: float) -> None:
        row: dict[str, str | int | float] = {"stage": stage, "step": step, "tokens": tokens}
        row["seconds"] = round(time.monotonic() - self.start)
        row.update({name: round(value, 4) for name, value in losses.items()})
        self.rows.append(row)
        print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.fields, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)


def build_model(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, end: int
) -> Qwen3ForCausalLM:
    """Build a randomly initialized Qwen3 with tied embeddings."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        intermediate_size=intermediate,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=end,
        eos_token_id=end,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.do_sample = False
    return model


def save_pair(
    models: Mapping[str, PreTrainedModel], tokenizer: PreTrainedTokenizerFast, out: Path
) -> None:
    """Save bf16 copies, each file moved into place whole so that readers never see half of one."""
    for name, model in models.items():
        with tempfile.TemporaryDirectory(dir=out) as temporary:
            copy.deepcopy(model).to(torch.bfloat16).save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            (out / name).mkdir(exist_ok=True)
            for path in Path(temporary).iterdir():
                path.chmod(0o644)
                path.replace(out / name / path.name)


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, stream: Tensor, windows: int = 48) -> float:
    """Return the mean next-token loss on evenly spread held-out windows."""
    starts = torch.linspace(0, len(stream) - SEQUENCE - 1, windows).long()
    losses = []
    for chunk in starts.split(8):
        tokens = torch.stack([stream[s : s + SEQUENCE + 1] for s in chunk])
        with autocast():
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        losses.append(F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()))
    return torch.stack(losses).mean().item()


def facts_of_training(script: str, seed: int) -> dict[str, Any]:
    """How a model was made, as far as every script says it: command, date, versions, seed."""
    return {
        "command": shlex.join(["python", f"examples/training/{script}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": seed,
    }


def write_json(path: Path, facts: dict[str, Any]) -> None:
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
