"""What a draft head is, once its files are read and its target is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from specc.drafters import block, eagle3, medusa, mtp
from specc.drafters.drafter import Drafter
from specc.drafters.feature_head import FeatureHead
from specc.drafters.model import PREFIX
from specc.errors import HeadError
from specc.passes.frontend.config_numbers import whole_number

EAGLE3, MTP = eagle3.FACTS.kind, mtp.FACTS.kind
DFLASH, DSPARK, MEDUSA = block.FACTS.kind, block.DSPARK_FACTS.kind, medusa.FACTS.kind
DFLASH2 = block.DFLASH2_FACTS.kind
# whose files they are
SAFEAILAB, SPECULATORS, DEEPSPEC, EAGLE_CONFIG = "SafeAILab", "speculators", "DeepSpec", "NVIDIA"
ZLAB, SPECFORGE = "z-lab", "SpecForge"
VLLM, FASTER_DECODING = "vLLM", "FasterDecoding"

# parameters of a head that may be its target's
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class TargetFacts:
    """What a head has to fit.

    Args:
        name: what the user called the target.
        width: H, of its residual stream.
        num_layers: n.
        vocab_size: V, rows of its embedding.
        config: of transformers, for heads that have a layer of the target's sizes.
    """

    name: str
    width: int
    num_layers: int
    vocab_size: int
    config: Any = field(default=None, compare=False)

    def require(self, what: str, found: Any, needed: int, name: str) -> None:
        """Compare what a head was made for with what the target has.

        Args:
            what: `layers` or `ids`.
            found: that its configuration names; None is nothing.
            needed: of the target.
            name: of the head.
        Raises:
            HeadError: they differ.
        """
        if found is not None and found != needed:
            raise HeadError(
                f"{name}: a head for a target of {found} {what}; {self.name} has {needed}",
                f"a head for a target of {needed} {what}",
                "pass the head of this target",
            )

    @classmethod
    def of_config(cls, name: str, config: Any) -> TargetFacts:
        """Those of a configuration of transformers."""
        keys = ("hidden_size", "num_hidden_layers", "vocab_size")
        width, num_layers, vocab_size = (whole_number(config, key) for key in keys)
        return cls(name, width, num_layers, vocab_size, config)


@dataclass(frozen=True)
class HeadSwitches:
    """What files leave open, or say in a way that not all of their readers share.

    None takes what the file says, and of what it does not say what its own trainer takes.

    Args:
        norm_before_residual: see `HeadFlags`.
        tap_convention: what ids of layers mean, see `tap_ids`.
        is_last_normed: of a tap after the last layer, whether it is taken after the final norm.
        sample_from_anchor: of a block drafter, see `BlockDraft.from_anchor`.
        candidates: of one whose logits depend on tokens before, see `OnePassEntry.candidates`.
    """

    norm_before_residual: bool | None = None
    tap_convention: str | None = None
    is_last_normed: bool | None = None
    sample_from_anchor: bool | None = None
    candidates: int | None = None


@dataclass(frozen=True)
class HeadFlags:
    """How EAGLE-3 and 3.1 differ.

    Args:
        norm_before_residual: the first layer adds to the normalized feature, not to the feature.
        norm_before_fc: all taps are normalized as one row before they are projected.
        fc_norm: each tap is normalized on its own before that.
        norm_output: a row hands on what the last norm returns (3.1), not what it reads (3.0).
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


@dataclass(frozen=True)
class RopeFacts:
    """Rotary embedding of a head.

    Args:
        kind: of the scaling; `default` is none.
        theta: base of the frequencies.
        trained_length: positions that its configuration was written for.
    """

    kind: str
    theta: float
    trained_length: int


@dataclass(frozen=True, eq=False)
class HeadSpec:
    """A head whose files fit its target.

    Args:
        kind: of `specc.drafters.registry.ALL`.
        layout: whose files: `SAFEAILAB`, `SPECULATORS`, `DEEPSPEC`, `EAGLE_CONFIG`, `ZLAB`,
            `SPECFORGE`, `VLLM`, `FASTER_DECODING`; for MTP see `mtp_spec`.
        directory: of the checkpoint.
        target: that it fits.
        config: of transformers, of its layers.
        boundaries: of the target, one for each tap, in the order in which it reads them.
        is_last_normed: a tap at boundary n is taken after the target's final norm.
        shared: parameters that are the target's: `EMBEDDING`, `HEAD`.
        warnings: what the user should know.
        tensors: parameter of the module → tensor of the checkpoint.
    """

    kind: str
    layout: str
    directory: Path
    target: TargetFacts
    config: Any
    boundaries: tuple[int, ...]
    is_last_normed: bool
    shared: tuple[str, ...]
    warnings: tuple[str, ...]
    tensors: dict[str, str]

    @property
    def width(self) -> int:
        """d, of its own features."""
        return int(self.config.hidden_size)

    @property
    def files(self) -> Path:
        """What its weights are read from, a directory or a file."""
        return self.directory

    @property
    def embedding_scale(self) -> float:
        """What it multiplies rows of its embedding with, where that is its target's."""
        return 1.0

    @property
    def hands_on(self) -> bool:
        """Whether each of its tokens hands a row on to those that follow it."""
        return True

    def drafter(self, name: str) -> Drafter:
        """What a plan has of it under this name."""
        return FeatureHead(int(name.removeprefix(PREFIX)))

    def without_confidence(self) -> Self:
        """The same, which does not say how likely its tokens are accepted."""
        return self

    @property
    def feature_columns(self) -> int:
        """A · H, of the taps of a token."""
        return len(self.boundaries) * self.target.width

    @property
    def trained_length(self) -> int:
        """Positions that its configuration was written for; 0 of one that knows none."""
        return int(self.config.max_position_embeddings)


@dataclass(frozen=True, eq=False)
class LayeredSpec(HeadSpec):
    """A head with layers of its own, and an embedding and a vocabulary head that may be.

    Args:
        draft_vocab_size: Vd, rows of its head.
        target_ids: [Vd] int64, the target's id of each row of the head, ascending; None where row
            i is id i.
        windows: keys that each of its layers sees, 0 is all.
        rope: of its layers.
    """

    draft_vocab_size: int
    target_ids: Tensor | None
    windows: tuple[int, ...]
    rope: RopeFacts

    def describe_taps(self) -> str:
        """What it reads, for people."""
        taps = ", ".join(str(place) for place in self.boundaries)
        last = " after the final norm" if self.is_last_normed else ""
        return f"reads the target at boundaries {taps}{last}"

    def describe_layers(self) -> list[str]:
        """Whose embedding and head they are, and how rows see each other, a line each."""
        ids = f"{self.draft_vocab_size} of {self.target.vocab_size} ids"
        owner = {True: "the target's", False: "its own"}
        windows = ", ".join(str(window) if window else "all" for window in self.windows)
        return [
            f"embedding: {owner[EMBEDDING in self.shared]};"
            f" head: {owner[HEAD in self.shared]}, {ids}",
            f"rotary embedding: {self.rope.kind}, theta {self.rope.theta:g}, trained for"
            f" {self.rope.trained_length} positions; rows seen: {windows}",
        ]


@dataclass(frozen=True, eq=False)
class EagleSpec(LayeredSpec):
    """An EAGLE-3 or 3.1 head; `config` is Llama's or Qwen3's.

    Args:
        flags: see there.
        has_qk_norm: queries and keys are normalized, each head on its own.
    """

    flags: HeadFlags
    has_qk_norm: bool

    def describe(self) -> list[str]:
        """What it is, a line each, for people."""
        flags = [name for name, is_set in vars(self.flags).items() if is_set]
        return [
            f"{self.kind} head, files of {self.layout}, {len(self.windows)} layers of {self.width}",
            self.describe_taps(),
            *self.describe_layers(),
            f"flags: {', '.join(flags) or 'none'}",
        ]
