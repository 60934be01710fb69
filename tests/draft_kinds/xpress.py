"""XPress drafters for the contract: files, formulas, and a rig.

The refiner goes over all rows of a block at once, as its trainer does; of rows after the one that
is asked for, it sees none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specc.drafters.xpress import XPressDraft
from specc.runtime.scheduling.request import Request
from tests.block_heads import MASK, BlockCase, config_of, draw_tensors
from tests.block_reference import BlockReference
from tests.draft_kinds.block import BlockRig
from tests.draft_kinds.rig import Said
from tests.heads import WIDTH, write_files
from tests.lossless import Zoo
from tests.runtime.block_rig import BlockOracle


@dataclass(frozen=True)
class XPressCase(BlockCase):
    """A drafter whose refiner has `columns` columns, and `ratio` times as many between."""

    layout: str = "speculators"
    kind: str = "xpress"
    columns: int = 6
    ratio: int = 3

    @property
    def hidden_columns(self) -> int:
        return self.width

    @property
    def is_partial(self) -> bool:
        return self.rows < self.vocab

    def written(self) -> dict[str, object]:
        """Contents of config.json."""
        return config_of(self) | {
            "architectures": ["XPressSpeculator"], "xpress_rank": self.columns,
            "xpress_mlp_ratio": self.ratio, "num_jacobi_passes": 6,
            "sample_from_anchor": self.from_anchor, "block_size": self.size,
        }  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        r, d, b, m = self.columns, self.width, self.size, self.columns * self.ratio
        shapes = {
            "token_embed.weight": (self.vocab, r), "down_h.weight": (r, d),
            "down_g.weight": (r, d), "in_proj.weight": (r, 3 * r), "mix_l": (r, b, b),
            "mlp_gate.weight": (m, r), "mlp_up.weight": (m, r), "mlp_down.weight": (r, m),
            "readout.weight": (self.rows, r),
        }  # fmt: skip
        generator = torch.Generator().manual_seed(9)
        own = {
            f"refiner_head.{key}": 0.4 * torch.randn(shape, generator=generator)
            for key, shape in shapes.items()
        }
        return draw_tensors(self) | own


XPRESS_CASES = {
    "xpress": XPressCase(
        width=24, rows=60, config={"target_hidden_size": WIDTH}, layer={"head_dim": 8}, num_layers=1
    ),
    # the anchor's row proposes, too
    "xpress-anchor": XPressCase(size=4, from_anchor=True, columns=5, ratio=2),
}


def write_xpress(path: Path, case: XPressCase) -> dict[str, Tensor]:
    return write_files(path, case.written(), case.tensors())


class XPressReference(BlockReference):
    def after(
        self, taps: Tensor, anchor: int, path: Sequence[int], before: int | None = None
    ) -> Tensor:
        """[V] logits of the token after a path of drafted ones.

        Args:
            before: the token before the anchor; the anchor where there is none.
        """
        tokens = [anchor, *path] if self.case.from_anchor else [before, anchor, *path]
        h = self.hidden(taps, anchor)
        rows, mean = h[: len(tokens)], h.mean(0).expand(len(tokens), -1)
        a = self.of(
            "in_proj",
            torch.cat([
                self.of("down_h", rows), self.of("down_g", mean),
                self.w["refiner_head.token_embed.weight"][tokens],
            ], 1),
        )  # fmt: skip
        mix = self.w["refiner_head.mix_l"]
        c = torch.stack([
            a[k] + sum(mix[:, k, j] * a[j] for j in range(k + 1)) for k in range(len(a))
        ])  # fmt: skip
        c = c + self.of("mlp_down", F.silu(self.of("mlp_gate", c)) * self.of("mlp_up", c))
        logits = self.proposed(taps, anchor)[len(path)]
        logits[self.ids] += self.of("readout", c)[-1]
        return logits

    def of(self, name: str, x: Tensor) -> Tensor:
        return self.linear(f"refiner_head.{name}", x)


class XPressOracle(BlockOracle):
    def after(self, request: Request, taps: Tensor, anchor: int, path: Sequence[int]) -> Tensor:
        known = request.token_ids[: request.cache_len]
        return self.reference.after(taps, anchor, path, known[-1] if known else anchor)  # type: ignore[no-any-return]

    def left(self, taps: Tensor, anchor: int, count: int, columns: int) -> Tensor:
        """All rows of a block, those that propose nothing last."""
        rows = (self.reference.rows(taps, anchor), self.reference.hidden(taps, anchor))
        return torch.cat(rows, 1).roll(0 if self.reference.case.from_anchor else -1, 0)


class XPressRig(BlockRig):
    cases = XPRESS_CASES
    prefix = "xpress"
    said = Said(
        (2, 5), "speculators", cache_columns=2 * 2 * 8,
        lines=(
            "draft_0 is a block drafter (xpress, files of speculators): it reads the target at",
            f"4 tokens a pass; mask token {MASK}; a refiner of 6 columns",
        ),
    )  # fmt: skip

    def write(self, path: Path, case: str) -> object:
        return write_xpress(path, XPRESS_CASES[case])

    def reference(self, case: str, *ends: Tensor) -> BlockReference:
        found = XPRESS_CASES[case]
        return XPressReference(found, found.tensors(), *ends)

    def oracle(self, zoo: Zoo, case: str = "", number: int = 0) -> BlockOracle:
        made = super().oracle(zoo, case, number)
        return XPressOracle(made.target, made.reference, number)


_SAMPLE = XPressDraft(
    5, 0, is_biased=True, draft="draft_0", kind="xpress", hidden_columns=24, inner_width=6
)
RIGS = (XPressRig("xpress", "xpress", _SAMPLE),)
