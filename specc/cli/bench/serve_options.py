"""Options of `specc bench serve`, and which of them go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.cli.bench.engine import BenchOptions
from specc.errors import ConfigError
from specc.load.arrivals import Arrivals, parse_on_off, parse_rates
from specc.system.machine import check_threads

if TYPE_CHECKING:
    from specc.load.run import LoadLimits

_ALL_AT_ONCE = "inf"


@dataclass(frozen=True)
class LoadOptions:
    """What the command line asks for; see its help.

    Args:
        policies: names with commas between them; None is what `specc serve` would use.
        request_rate: rates with commas between them.
        table: latency table that goodput starts from.
        measure_table: file for one that is measured first.
        simulate: latency table that takes the engine's place.
        json: file for the report, `-` is standard output.
    """

    base_url: str | None = None
    simulate: Path | None = None
    request_rate: str = _ALL_AT_ONCE
    policies: str | None = None
    rounds: int = 1
    num_requests: int = 100
    max_seconds: float | None = None
    burstiness: float = 1.0
    on_off: str | None = None
    prompts: Path | None = None
    prompt_tokens: str | None = None
    output_tokens: str = "128"
    seed: int = 0
    max_concurrency: int | None = None
    warmup: int = 4
    timeout: float | None = None
    goodput: tuple[str, ...] = ()
    temperature: float = 0.0
    share_prefixes: bool = False
    max_num_seqs: int | None = None
    threads: int | None = None
    backend: str | None = None
    verify: bool | None = None
    acceptance: str | None = None
    table: Path | None = None
    measure_table: Path | None = None
    compare_simulation: bool = False
    model: str | None = None
    api_key: str | None = None
    trace: Path | None = None
    details: Path | None = None
    json: str | None = None
    plot: Path | None = None

    def check(self, directory: Path | None) -> None:
        """Find what can be found before anything loads.

        Raises:
            ConfigError: a value outside its range, or options that exclude each other.
            OutputError: the directory of an output is absent.
        """
        # a plain benchmark's outputs follow the same rules
        BenchOptions(threads=self.threads, json=self.json, plot=self.plot).check()
        check_threads(self.threads)
        if self.warmup < 0:
            raise ConfigError(f"--warmup {self.warmup}", "0 or more", "raise --warmup")
        if self.base_url is not None and self.simulate is not None:
            raise ConfigError("--base-url and --simulate", "one of them", "leave one out")
        if directory is None and self.base_url is None and self.simulate is None:
            raise ConfigError(
                "nothing to measure",
                "an engine directory, --base-url, or --simulate",
                "specc bench serve ENGINE, or specc bench serve --base-url http://localhost:8000",
            )
        is_here = self.base_url is None and self.simulate is None
        self._refuse(is_here, "an engine in this process", self._of_engines())
        self._refuse(self.base_url is not None, "--base-url", self._of_servers())
        has_dice = self.simulate is not None or self.compare_simulation
        dice = {"--acceptance": self.acceptance}
        self._refuse(has_dice, "--simulate or --compare-simulation", dice)
        self._check_simulation(directory)

    def _check_simulation(self, directory: Path | None) -> None:
        if self.table is not None and self.measure_table is not None:
            raise ConfigError("--table and --measure-table", "one of them", "leave one out")
        if self.compare_simulation and self.table is None and self.measure_table is None:
            raise ConfigError(
                "--compare-simulation without a latency table",
                "what passes cost on this machine",
                "add --measure-table FILE, or --table FILE of an earlier run here",
            )
        if self.simulate is not None and self.acceptance is None:
            raise ConfigError(
                "--simulate without --acceptance",
                "how often drafts are right, by depth and sibling rank",
                "for example --acceptance 0.73,0.1/0.75,0.1/0.8",
            )
        if self.simulate is not None and directory is None and self.prompt_tokens is None:
            raise ConfigError(
                "--simulate without an engine, whose tokenizer counts the prompts' tokens",
                "their number",
                "add --prompt-tokens, or name the engine",
            )

    def _of_engines(self) -> dict[str, object]:
        return {
            "--backend": self.backend,
            "--verify": self.verify,
            "--threads": self.threads,
            "--share-prefixes": self.share_prefixes or None,
            "--table": self.table,
            "--measure-table": self.measure_table,
            "--compare-simulation": self.compare_simulation or None,
        }

    def _of_servers(self) -> dict[str, object]:
        return {"--model": self.model}

    def _refuse(self, is_so: bool, subject: str, given: Mapping[str, object]) -> None:
        for name, value in given.items():
            if value is not None and not is_so:
                raise ConfigError(name, f"{name} with {subject} only", f"leave {name} out")

    def arrivals(self) -> list[Arrivals]:
        on_off = parse_on_off(self.on_off)
        return [Arrivals(rate, self.burstiness, on_off) for rate in parse_rates(self.request_rate)]

    def limits(self) -> LoadLimits:
        from specc.load.run import LoadLimits

        return LoadLimits(self.max_concurrency, self.timeout)

    def settings(self) -> dict[str, Any]:
        """For the report; no key of a server."""
        settings = asdict(self) | {"goodput": list(self.goodput)}
        del settings["api_key"], settings["json"]
        paths = {name: str(value) for name, value in settings.items() if isinstance(value, Path)}
        return settings | paths
