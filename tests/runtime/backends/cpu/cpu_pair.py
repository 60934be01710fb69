"""One compiled engine in two ways: as compiled code, and operator by operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specc.runtime.backends.cpu.program import CpuProgram
from specc.runtime.backends.program_files import MappedWeights, read_json
from specc.runtime.engine import Engine
from tests import models
from tests.lossless import Zoo, layout_of
from tests.mixed_sampling import mixed_sampling

Environment = dict[str, Tensor]


@dataclass(frozen=True)
class Pair:
    """One engine directory, loaded twice."""

    path: Path
    compiled: Engine
    eager: Engine

    def fill_caches(self, seed: int = 0) -> None:
        """The same random rows in both: a row that is wrongly read or written shows."""
        generator = torch.Generator().manual_seed(seed)
        for model, slabs in self.eager.cache.slabs.items():
            for mine, other in zip(slabs, self.compiled.cache.slabs[model], strict=True):
                mine.normal_(generator=generator)
                other.copy_(mine)
        history = self.eager.cache.history
        history.random_(0, models.VOCAB, generator=generator)
        self.compiled.cache.history.copy_(history)


def engine_path(zoo: Zoo, name: str) -> Path:
    layout = layout_of(name)
    sizes = layout["block_size"], layout["prefill_chunk"], models.MAX_SEQ_LEN
    return zoo.compiled(name, "noisy", *sizes, "float32", "cpu")


def load_pair(zoo: Zoo, name: str) -> Pair:
    path = engine_path(zoo, name)
    return Pair(path, Engine.load(path), Engine.load(path, backend="eager"))


def load_program(directory: Path, caches: Sequence[tuple[Tensor, Tensor]]) -> CpuProgram:
    """The program of a model's directory, as the backend loads it."""
    return CpuProgram(
        read_json(directory / "program.json"),
        MappedWeights(directory / "weights.safetensors"),
        caches,
    )


def block_table(engine: Engine, batch: int, seed: int) -> Tensor:
    """Blocks of `batch` sequences, in no order."""
    shape = engine.cache.shape
    blocks = torch.randperm(shape.num_blocks, generator=torch.Generator().manual_seed(seed))
    table = blocks[: batch * shape.blocks_per_sequence].view(batch, -1)
    return table.to(torch.int32)


def step_inputs(engine: Engine, batch: int, seed: int, is_greedy: bool = False) -> Environment:
    """What the runner gives a step; the first sequence has no committed row."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 90, (batch,), generator=generator, dtype=torch.int32)
    lengths[0] = 0
    values, words = mixed_sampling(batch, seed, is_greedy)
    return {
        "last_tokens": torch.randint(0, models.VOCAB, (batch, 2), generator=generator),
        "cache_len": lengths,
        "block_table": block_table(engine, batch, seed),
        "sampling_values": values,
        "sampling_words": words,
        **engine.cache.environment,
    }
