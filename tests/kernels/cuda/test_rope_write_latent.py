"""Rotations beside latents, and the write of their rows, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specc.kernels.cuda.rope_write_latent import rope_write_latent
from specc.kernels.reference.latent import PAIRS, rope_write_latent_reference
from tests.kernels.cuda.cases_write_kv import Case, break_rows, make_rows

pytestmark = pytest.mark.usefixtures("poisoned_memory")

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# the sums of two products may be fused: one unit in the last place
TOLERANCE = {F32: 1e-6, F16: 2e-3, BF16: 1e-2}
# sequences, (heads, latents, beside them), dtype of rows, of angles, of the cache
CASES = {
    "one-token": (((1, 3),), (5, 16, 8), F32, F32, F32),
    "odd-widths": (((2, 15), (3, 20), (2, 12)), (3, 12, 6), F32, F32, F32),
    "bf16": (((4, 9), (1, 2)), (9, 24, 8), BF16, F32, BF16),
    "wider-cache": (((3, 9), (2, 30)), (4, 20, 4), F16, F16, F32),
    "deepseek": (((2, 5),), (16, 512, 64), BF16, BF16, BF16),
}


def make_args(name: str, device: torch.device) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments, and the cache; rows are columns of wider tensors."""
    sequences, (heads, size, width), dtype, angle, cached = CASES[name]
    places = make_rows(Case(sequences), device)
    tokens = places["slot"].shape[0]
    torch.manual_seed(tokens)

    def rows(count: int, columns: int) -> torch.Tensor:
        wide = torch.randn(tokens, count * (columns + 3), device=device).to(dtype)
        return wide.view(tokens, count, columns + 3)[..., :columns].transpose(0, 1)

    cos, sin = torch.randn(2, tokens, width + 4, device=device).to(angle)[..., :width]
    blocks, block_size = places["k_cache"].shape[:2]
    cache = torch.randn(blocks, block_size, 1, size + width, device=device).to(cached)
    args = {"q": rows(heads, size), "q_rest": rows(heads, width), "latent": rows(1, size)}
    args |= {"shared": rows(1, width), "cos": cos, "sin": sin, "k_cache": cache}
    args |= {"v_cache": cache[..., :size]}
    return args | {key: places[key] for key in ("q_start", "slot", "block_table")}, cache


@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("name", CASES)
def test_rope_write_latent(name: str, pairs: str, device: torch.device) -> None:
    (args, cache), (expected, wanted) = (make_args(name, device) for _ in range(2))
    got = rope_write_latent(**args, pairs=pairs)
    want = rope_write_latent_reference(**expected, pairs=pairs)
    tolerance = TOLERANCE[args["q"].dtype]
    assert got.transpose(0, 1).is_contiguous()
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(cache, wanted, rtol=tolerance, atol=tolerance)
    size = args["q"].shape[2]
    # what is not rotated is copied
    assert torch.equal(got[..., :size], args["q"])
    assert torch.equal(cache[..., :size], wanted[..., :size])


def test_places_outside_of_the_cache_are_not_written(device: torch.device) -> None:
    args, cache = make_args("odd-widths", device)
    before = cache.clone()
    want = rope_write_latent(**args, pairs="halves")
    written = (cache != before).any(-1)
    assert written.sum() == args["slot"].shape[0]
    cache.copy_(before)
    assert torch.equal(rope_write_latent(**break_rows(args), pairs="halves"), want)
    assert (cache != before).any(-1).sum() < written.sum()


def test_no_tokens(device: torch.device) -> None:
    args, _ = make_args("one-token", device)
    args = {k: v[:, :0] if k in ("q", "q_rest", "latent", "shared") else v for k, v in args.items()}
    args |= {"cos": args["cos"][:0], "sin": args["sin"][:0], "slot": args["slot"][:0]}
    assert rope_write_latent(**args, pairs="apart").shape == (5, 0, 24)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"q": torch.zeros(5, 1, 16, dtype=torch.float64)}, "found torch.float64"),
        ({"shared": torch.zeros(1, 1, 8, dtype=F16)}, "found torch.float32"),
        ({"q_rest": torch.zeros(5, 1, 7)}, "P even"),
        ({"latent": torch.zeros(2, 1, 16)}, "P even"),
        ({"cos": torch.zeros(1, 4)}, "P even"),
        ({"k_cache": torch.zeros(4, 16, 2, 24)}, "found k_cache"),
        ({"slot": torch.zeros(2, dtype=torch.int32)}, "found k_cache"),
        ({"pairs": "thirds"}, "found thirds"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused(change, found, device):
    args, _ = make_args("one-token", device)
    change = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(ValueError, match=found):
        rope_write_latent(**({"pairs": "halves"} | args | change))
