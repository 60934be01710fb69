"""Options of `specc bench`: of every benchmark, and of shapes with random weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from specc.bench.peers.names import PEERS, check_name
from specc.cli.options.common import PromptFile, ReportOptions
from specc.errors import ConfigError
from specc.option import check_ranges, option
from specc.runtime.engine_args import EngineArgs

if TYPE_CHECKING:
    from specc.bench.report import Settings

BUILT_IN = "built-in"
DEFAULT_CONTEXT = 1024


@dataclass(frozen=True)
class BenchOptions(PromptFile, ReportOptions):
    """What every benchmark is asked for.

    Args:
        args: how the engine is opened.
    Raises:
        ConfigError: a value outside its range.
    """

    tokens: int = option(
        128,
        "Output tokens to generate for each prompt; EOS does not end an output. Of a data set, the"
        " most of a turn.",
        least=2,
    )
    dataset: Path | None = option(
        None,
        "Conversations instead of prompts, with figures by category: question.jsonl of Spec-Bench,"
        " or SPEED-Bench as JSON lines.",
        metavar="FILE",
    )
    edits: Path | None = option(
        None,
        "A file, such as a module of Python, that the target writes again with 1 %, 10 % and 50 %"
        " of its lines changed: with its text as the prediction, with a wrong one, and without.",
        metavar="FILE",
    )
    batch_size: int = option(1, "Prompts that are decoded together.", least=1)
    plans: tuple[str, ...] = option(
        (), "Measure this plan instead of the engine's default one; repeatable.", "--plan"
    )
    against: tuple[str, ...] = option(
        (),
        f"Also measure another program, plain, with the draft and with prompt lookup; repeatable:"
        f" {', '.join(PEERS)}.",
        metavar="NAME",
    )
    target_checkpoint: str | None = option(
        None, "Checkpoint for --against; without it, the one that was compiled."
    )
    draft_checkpoint: str | None = option(
        None, "Checkpoint for --against; without it, the one that was compiled."
    )
    synthetic_acceptance: str | None = option(
        None,
        "Draw acceptance by sibling rank: what a step costs, apart from the draft.",
        metavar="P1,P2,…",
    )
    rounds: int = option(5, "Rounds that are measured.", least=1)
    warmup: int = option(1, "Rounds that run before them and do not count.", least=0)
    args: EngineArgs = field(default_factory=EngineArgs)

    def __post_init__(self) -> None:
        check_ranges(self)
        for name in self.against:
            check_name(name)
        if self.dataset is not None:
            self._check_dataset()
        if self.edits is not None:
            self._check_edits()

    def _check_edits(self) -> None:
        """Raises ConfigError: options that edits of a file do not go with."""
        for name, value in (
            ("--prompts", self.prompts),
            ("--dataset", self.dataset),
            ("--plan", " --plan ".join(self.plans) or None),
            ("--synthetic-acceptance", self.synthetic_acceptance),
            ("--plot", self.plot),
            ("--batch-size", None if self.batch_size == 1 else self.batch_size),
        ):
            if value is not None:
                raise ConfigError(
                    f"--edits {self.edits} and {name} {value}", "one of them", f"leave out {name}"
                )

    def _check_dataset(self) -> None:
        """Raises ConfigError: options that conversations do not go with."""
        for name, value, reason in (
            ("--prompts", self.prompts, "one of them"),
            (
                "--against",
                " --against ".join(self.against) or None,
                "plans of the engine: answers make the prompts that follow",
            ),
            (
                "--synthetic-acceptance",
                self.synthetic_acceptance,
                "answers of the target, which dice do not give",
            ),
        ):
            if value is not None:
                raise ConfigError(
                    f"--dataset {self.dataset} and {name} {value}", reason, f"leave out {name}"
                )

    def named(self) -> dict[str, object]:
        """Options that only an engine has, by name."""
        return {
            "--plan": self.plans,
            "--prompts": self.prompts,
            "--dataset": self.dataset,
            "--edits": self.edits,
            "--num-prompts": self.num_prompts,
            "--target-checkpoint": self.target_checkpoint,
            "--draft-checkpoint": self.draft_checkpoint,
            "--verify": self.args.verify,
            "--overlap": self.args.overlaps or None,
        }

    def settings(self) -> Settings:
        """The part of the options that the report repeats."""
        from specc.bench.report import Settings
        from specc.cost.acceptance import parse_ranks

        text = self.synthetic_acceptance
        return Settings(
            rounds=self.rounds,
            warmup=self.warmup,
            tokens=self.tokens,
            batch_size=self.batch_size,
            prompts=str(self.dataset or self.prompts or BUILT_IN),
            dataset=None if self.dataset is None else str(self.dataset),
            against=list(dict.fromkeys(self.against)),
            synthetic_acceptance=None
            if text is None
            else parse_ranks(text, "--synthetic-acceptance"),
        )


@dataclass(frozen=True)
class ShapesOptions:
    """What `--synthetic` adds to the options of every benchmark.

    Args:
        synthetic: shapes of the target and, after a slash or a comma, of the draft; None measures
            an engine.
    Raises:
        ConfigError: a value outside its range.
    """

    synthetic: str | None = option(
        None,
        "Shapes of published models with random weights, instead of an engine.",
        metavar="TARGET[/DRAFT]",
    )
    context: int | None = option(
        None, "With --synthetic: tokens of a prompt; 1024 unless it is given.", least=1
    )
    draft: str | None = option(
        None,
        "With --synthetic, in place of a draft of another shape: self:window=W,sink=S, the target"
        " itself over a part of its context; or a head that reads its hidden states, eagle3,"
        " dflash, dspark or medusa.",
        metavar="self:…|HEAD",
    )
    trees: tuple[str, ...] = option(
        (), "With --synthetic: a tree, in the form that specc compile takes.", "--tree"
    )
    num_speculative_tokens: int | None = option(None, "With --synthetic: a chain of this length.")
    dtype: str | None = option(
        None, "With --synthetic: dtype of the weights; without it, what suits the device."
    )
    quantize: str | None = option(
        None,
        "With --synthetic: weights of projections in int8, int4 or fp8, as specc compile has them.",
    )
    draft_quantize: str | None = option(
        None, "With --synthetic: the same for the draft, a head too, or off."
    )
    quantize_group: int | None = option(
        None, "Of weights in int4 or int8: how many columns share a scale: 32, 64 or 128."
    )
    weight_fragments: bool = option(
        False,
        "With --synthetic: quantized weights in the order of specc compile --weight-fragments.",
    )
    estimate: bool = option(
        False,
        "With --synthetic: nodes, bytes and estimated time of a step on an H200; needs no GPU and"
        " measures nothing.",
    )

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def num_context(self) -> int:
        return DEFAULT_CONTEXT if self.context is None else self.context

    def named(self) -> dict[str, object]:
        """Options that only shapes have, by name."""
        return {
            "--context": self.context,
            "--draft": self.draft,
            "--tree": self.trees,
            "--num-speculative-tokens": self.num_speculative_tokens,
            "--dtype": self.dtype,
            "--quantize": self.quantize,
            "--draft-quantize": self.draft_quantize,
            "--quantize-group": self.quantize_group,
            "--weight-fragments": self.weight_fragments or None,
            "--estimate": self.estimate or None,
        }
