"""A tiny model as two programs of one weights file: flat and eager, and padded in ONNX."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, fx

from specc.artifact.cache_rows import CacheRows, Reach, reaches_of
from specc.artifact.kv_rows import AUTO
from specc.artifact.mla_cache import LATENT
from specc.artifact.model_entry import LayerEntry, ModelEntry
from specc.compiler.phases import MLA
from specc.kernels import ops
from specc.passes.lower.onnx.lower import OnnxFile, lower_onnx
from specc.passes.pipeline import FUSE_PHASES, PHASES, TRACED_PHASES, PassRecord, Phases
from specc.passes.program import Program, constant_key
from specc.passes.program_json import program_to_json
from specc.passes.rewrite.absorb_latent import AbsorbLatent
from specc.passes.rewrite.padded import padded_program
from specc.runtime.backends.eager.program import ModelProgram
from specc.runtime.backends.onnx.program import load_onnx
from specc.runtime.backends.padded.padded_batch import padded_batch
from tests.flat_passes import Inputs
from tests.kept import COMPILER, keep
from tests.models import POSITIONS, build_model
from tests.passes.modules import compiled, stored_rows
from tests.traces import shared_traces

WEIGHTS = "weights.safetensors"
# of files that tests of what is written and of what runs have in common
ROWS = CacheRows(front=2, slots=POSITIONS + 5, scratch=73)
# what the tiny models are made by
_MODELS = ("tests/models.py", "tests/onnx_models.py")
Caches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Lowered:
    """Both programs of a model.

    Args:
        made_of: all that decides what they are, besides sources.
    """

    model: Any
    flat: Program
    padded: Program
    flat_records: list[PassRecord]
    records: list[PassRecord]
    rows: CacheRows
    made_of: tuple[Any, ...]

    @property
    def weights(self) -> dict[str, Tensor]:
        """Key → tensor of each weight, tied ones once."""
        tensors = dict(self.model.named_parameters(remove_duplicate=False))
        # routers of some mixtures read a bias that is a buffer
        tensors |= dict(self.model.named_buffers(remove_duplicate=False))
        return {weight.key: stored_rows(weight, tensors) for weight in self.flat.weights.values()}

    @property
    def reaches(self) -> list[Reach]:
        return reaches_of(self.flat.layers)


def lowered(
    name: str,
    rows: CacheRows,
    dtype: torch.dtype = torch.float32,
    has_latents: bool = False,
    **changes: Any,
) -> Lowered:
    """Both programs of a tiny model of tests/models.py; `has_latents` is of their caches."""
    model = build_model(name, **changes).to(dtype)
    flat, pipeline = compiled(model, latent_phases() if has_latents else PHASES)
    with shared_traces():
        padded, records = padded_program(model, flat, rows.total)
    made_of = name, rows, dtype, has_latents, sorted(changes.items())
    return Lowered(model, flat, padded, pipeline.records, records, rows, made_of)


def write_onnx(pair: Lowered, directory: Path) -> OnnxFile:
    """model.onnx and weights.safetensors; the same pair is written once, see tests/kept.py."""

    def make(made: Path) -> None:
        made.mkdir()
        save_file(pair.weights, made / WEIGHTS)
        file = lower_onnx(pair.padded, made / "model.onnx", made / WEIGHTS)
        (made / "file.json").write_text(json.dumps(asdict(file)))

    keep(directory, make, *pair.made_of, sources=(*COMPILER, *_MODELS))
    found = json.loads((directory / "file.json").read_text())
    return OnnxFile(**found | {key: tuple(found[key]) for key in ("inputs", "outputs")})


def model_entry(pair: Lowered) -> ModelEntry:
    """What an engine's manifest says of the model."""
    layers = tuple(
        LayerEntry(
            layer.name,
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.window,
            slab=0,
            index=i,
            chunk=layer.chunk,
            value_dim=layer.value_dim,
            values_in_keys=layer.values_in_keys,
        )
        for i, layer in enumerate(pair.flat.layers)
    )
    dtype = str(next(pair.model.parameters()).dtype).removeprefix("torch.")
    vocab = pair.model.config.vocab_size
    return ModelEntry(
        "target", ".", "Tiny", "tiny", vocab, 0, vocab, layers, (), "a test", dtype
    )  # fmt: skip


def latent_phases() -> Phases:
    """Those of every engine whose caches hold latents."""
    return (*TRACED_PHASES, (MLA, (lambda: AbsorbLatent(LATENT, AUTO, 1),)), *FUSE_PHASES)


class BothPrograms:
    """The two programs of a model with the same rows in their caches.

    Args:
        directory: with the files of `write_onnx`; None runs the padded graph itself.
        num_blocks: sequences that the caches hold.
    """

    def __init__(self, pair: Lowered, directory: Path | None, num_blocks: int) -> None:
        self.rows = pair.rows
        dtype = next(pair.model.parameters()).dtype
        generator = torch.Generator().manual_seed(5)

        def cache(heads: int, dim: int) -> Tensor:
            # no zeros: whoever attends to a row that was never written is found out
            shape = (num_blocks, heads, self.rows.total, dim)
            return torch.randn(shape, generator=generator).to(dtype)

        self.onnx_caches: Caches = []
        self.flat_caches: Caches = []
        for layer in pair.flat.layers:
            kept = [cache(layer.num_kv_heads, layer.head_dim)]
            if not layer.values_in_keys:
                kept.append(cache(layer.num_kv_heads, layer.head_dim))
            for caches, own in (
                (self.onnx_caches, kept),
                (self.flat_caches, [self.as_flat(x).contiguous() for x in kept]),
            ):
                caches.append((own[0], own[-1][..., : layer.columns_of_values]))
        constants = {constant_key(key): value for key, value in pair.flat.constants.items()}
        self.flat = ModelProgram(
            program_to_json(pair.flat), pair.weights | constants, self.flat_caches
        )
        # the one under test
        self.onnx: Any = EagerPadded(pair, self.onnx_caches)
        if directory is not None:
            self.onnx = load_onnx(directory, model_entry(pair), self.onnx_caches, self.rows)

    def as_flat(self, cache: Tensor) -> Tensor:
        """[blocks, slots, HK, D] of an HND cache."""
        return cache[:, :, self.rows.front : self.rows.front + self.rows.slots].transpose(1, 2)

    def compare(self, inputs: Inputs, tolerance: float) -> Tensor:
        """Run a pass in both; returns the logits of the flat one.

        Logits of tokens that have a slot, and written rows, may differ by the tolerance, relative
        to the largest value; rows that hold committed tokens, or those of other sequences, must
        not have changed at all.
        """
        before = [[part.clone() for part in pair] for pair in self.onnx_caches]
        wanted = self.flat(**inputs)
        found = self.onnx(**inputs)
        assert found.shape == wanted.shape
        live = inputs["slot"][inputs["logit_rows"]] >= 0
        assert_close(found[live], wanted[live], tolerance)
        written, kept = self._rows_of(inputs)
        assert not bool((written & kept).any())
        for flat, onnx, old in zip(self.flat_caches, self.onnx_caches, before, strict=True):
            for a, b, c in zip(flat, onnx, old, strict=True):
                now, then = self.as_flat(b), self.as_flat(c)
                assert torch.equal(now[kept], then[kept]), "a committed row has changed"
                assert torch.equal(a[kept], then[kept])
                if bool(written.any()):
                    assert_close(now[written], a[written], tolerance)
                # what filled short sequences up is nobody's: the next pass starts alike
                now.copy_(a)
        return wanted

    def _rows_of(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """[blocks, slots]: rows that the pass writes, and rows that it must leave alone."""
        written = torch.zeros(len(self.onnx_caches[0][0]), self.rows.slots, dtype=torch.bool)
        kept = torch.ones_like(written)
        starts = inputs["q_start"].tolist()
        for b, block in enumerate(inputs["block_table"][:, 0].tolist()):
            slots = inputs["slot"][starts[b] : starts[b + 1]].long()
            written[block, slots[slots >= 0]] = True
            if len(slots) and int(slots[0]) > -(1 << 20):
                # a pass may write what it likes after its first token
                kept[block, max(int(slots[0]), 0) :] = False
        return written, kept


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Equal to a share of the largest value."""
    found, wanted = found.float(), wanted.float()
    if not wanted.numel():
        return
    assert bool(found.isfinite().all())
    error = float((found - wanted).abs().max() / wanted.abs().max())
    assert error <= tolerance, f"{error:.2e} of the largest value"


class EagerPadded:
    """The padded program's graph operator by operator, with caches that passes change."""

    def __init__(self, pair: Lowered, caches: Caches) -> None:
        self._pair = pair
        program = pair.padded
        values = {
            name: caches[layer][part == "v"] for name, (layer, part) in program.caches.items()
        }
        weights = pair.weights
        values |= {name: weights[weight.key] for name, weight in program.weights.items()}
        self._values = values | program.constants

    @torch.no_grad()
    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        q_start: Tensor,
        slot: Tensor,
        cache_len: Tensor,
        ancestors: Tensor | None,
        block_table: Tensor,
        logit_rows: Tensor,
    ) -> Tensor:
        """A pass of as many tokens for each of its sequences."""
        shape, blocks = (len(cache_len), -1), block_table[:, 0].long()
        made = padded_batch(
            self._pair.rows,
            self._pair.reaches,
            *(x.view(shape) for x in (tokens, positions, slot)),
            cache_len,
            None if ancestors is None else ancestors.view(*shape, ancestors.shape[-1]),
            logit_rows,
        )
        program = self._pair.padded
        given = made._asdict()
        given |= {reach.mask_input: mask for reach, mask in given.pop("masks").items()}
        values: list[Tensor] = []
        for node in program.graph.find_nodes(op="placeholder"):
            if node.target in program.caches:
                values.append(self._values[node.target][blocks])
            else:
                values.append(
                    given[node.target] if node.target in given else self._values[node.target]
                )
        run = _Writes(program.graph_module)
        logits = run.run(*values)
        for name, written in run.written.items():
            self._values[name][blocks] = written
        return logits


class _Writes(fx.Interpreter):
    """Keeps what caches are after a pass."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.written: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.target is ops.cache_write:
            assert n.args[0].target not in self.written, "a cache is written once"
            self.written[n.args[0].target] = value
        return value
