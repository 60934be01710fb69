"""How a draft is fitted, as users ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specc.errors import ConfigError
from specc.option import check_ranges, option


@dataclass(frozen=True)
class FitOptions:
    """What to learn from, how long, and what comes out.

    Raises:
        ConfigError: a value outside its range.
    """

    kind: str = option(
        ...,
        "What to fit: eagle3, a head that drafts token by token, or a drafter that proposes a block"
        " of tokens in one pass: block (DSpark), dflash, jetspec,"
        " dflash2, lilicorr.",
        shows_default=False,
    )
    output: Path = option(
        ..., "The directory of the draft to make.", "--output", "-o", shows_default=False
    )
    texts: tuple[Path, ...] = option(
        (),
        "Text to learn from, like what the target will read and write: a UTF-8 file, a directory of"
        ' them, or JSON lines with {"messages": […]}, {"prompt": "…"} or {"text": "…"}. Repeatable.'
        " One document of sixteen is held out.",
    )
    minutes: float = option(
        30.0, "Minutes for all of it, but for reading the target and the report.", above=0
    )
    steps: int | None = option(
        None, "Steps of training, at most: together with --generate, a repeatable run.", least=1
    )
    generate: int | None = option(
        None,
        "Tokens that the target writes to learn from, half of them greedily. Without it: where"
        " texts have fewer than a million tokens, what a quarter of the minutes allow.",
        least=0,
    )
    prompts: Path | None = option(
        None,
        'File of JSON lines, each {"prompt": "…"}: documents that hold one of them are left out,'
        " and what the draft is worth is measured along them, too.",
    )
    num_speculative_tokens: int = option(
        4, "Tokens that the draft proposes in a row.", least=1, most=32
    )
    draft_vocab_size: int | None = option(
        None,
        "Token ids that the draft can propose, those that texts have most of. Without it: all, and"
        " 16,384 of a vocabulary of more than 65,536.",
        least=2,
    )
    width: int | None = option(None, "Columns of the draft; without it, the target's.", least=8)
    inner: int | None = option(None, "Columns of its MLP; without it, twice its own.", least=8)
    taps: str | None = option(
        None,
        "Layers of the target before which the draft reads hidden states; without it, those that"
        " readers take by default.",
        metavar="2,9,15",
    )
    length: int = option(512, "Tokens of a text to learn from, at most.", least=32)
    disk_gb: float = option(
        8.0, "Gigabytes of hidden states to keep on disk, at most; the rest is not read.", above=0
    )
    device: str = option("cpu", "Where target and draft compute: cpu, or cuda.")
    num_threads: int | None = option(None, "Threads of a CPU; without it, all cores.", least=1)
    seed: int = option(0, "Of all that is drawn.", least=0)
    resume: bool = option(False, "Go on with the run that was ended at --output.", "--resume")

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.texts:
            raise ConfigError("no --texts", "texts to learn from", "pass --texts FILE")
        self.boundaries()

    def boundaries(self) -> tuple[int, ...] | None:
        """Of the target, that the draft reads; None: those of the default.

        Raises:
            ConfigError: they are no numbers, or not in order.
        """
        if self.taps is None:
            return None
        try:
            found = tuple(int(part) for part in self.taps.split(","))
        except ValueError:
            found = ()
        # 1 first: readers take such lists for others
        if not found or list(found) != sorted(set(found)) or found[0] < 0 or found[0] == 1:
            raise ConfigError(
                f"--taps {self.taps}",
                "numbers of layers in order, the first of which is not 1",
                "pass such as --taps 2,9,15, or leave it out",
            )
        return found
