"""Options of `specc bench serve`, and which of them go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.cli.options.common import PromptFile, ReportOptions
from specc.errors import ConfigError
from specc.option import check_ranges, option
from specc.runtime.engine_args import EngineArgs

if TYPE_CHECKING:
    from specc.load.arrivals import Arrivals
    from specc.load.run import ClientLimits


@dataclass(frozen=True)
class TrafficOptions(PromptFile):
    """Which requests come, and when."""

    request_rate: str = option("inf", "Requests a second; inf is all at once.", metavar="R1,R2,…")
    rounds: int = option(1, "Rounds of the whole sweep, interleaved.", least=1)
    num_requests: int = option(100, "Requests of each rate, policy and round.", least=1)
    max_seconds: float | None = option(None, "Leave out requests that come later.")
    burstiness: float = option(1.0, "1: Poisson; less: in bursts; more: more even; inf: constant.")
    on_off: str | None = option(
        None, "Seconds with requests, then without, repeated.", metavar="ON,OFF"
    )
    prompt_tokens: str | None = option(
        None,
        "128, uniform:64-256 or lognormal:MEAN,SPREAD[,LEAST-MOST]; without it, prompts as they"
        " are.",
        metavar="LENGTHS",
    )
    output_tokens: str = option(
        "128",
        "Output tokens of each request, in the same form; EOS does not end outputs.",
        metavar="LENGTHS",
    )
    seed: int = option(0, "Seed of arrivals, lengths and sampling.")
    temperature: float = option(0.0, "0 is greedy.")
    max_concurrency: int | None = option(None, "Most requests that are open at a time.", least=1)
    warmup: int = option(4, "Requests before each run that do not count.", least=0)
    timeout: float | None = option(None, "Seconds after which a request has failed.", above=0)

    def arrivals(self) -> list[Arrivals]:
        """One of each rate.

        Raises:
            ConfigError: rates, a burstiness or phases that make no load.
        """
        from specc.load.arrivals import Arrivals, parse_on_off, parse_rates

        on_off = parse_on_off(self.on_off)
        return [Arrivals(rate, self.burstiness, on_off) for rate in parse_rates(self.request_rate)]

    def limits(self) -> ClientLimits:
        from specc.load.run import ClientLimits

        return ClientLimits(self.max_concurrency, self.timeout)


@dataclass(frozen=True)
class LoadOptions(TrafficOptions, ReportOptions):
    """What the command line asks for; see its help.

    Args:
        args: how the engine is opened.
    Raises:
        ConfigError: a value outside its range.
    """

    base_url: str | None = option(None, "A server of OpenAI's completions, instead.", metavar="URL")
    simulate: Path | None = option(
        None,
        "Simulate a machine: the real scheduler on a latency table's seconds.",
        metavar="TABLE.json",
    )
    policies: str | None = option(
        None,
        "Plans and policies, in turn at each rate; else what specc serve uses.",
        metavar="P1,P2,…",
    )
    goodput: tuple[str, ...] = option(
        (),
        'Objectives, such as "ttft:200 tpot:50 e2el:2000": count the requests that keep all of'
        " them.",
        metavar="NAME:MS",
    )
    share_prefixes: bool = option(
        False, "Reuse prompts' cache rows; prompts repeat, so it flatters."
    )
    acceptance: str | None = option(
        None,
        "Of simulations: by depth and sibling rank, as in 0.73,0.1/0.75,0.1.",
        metavar="ROWS",
    )
    table: Path | None = option(None, "Latency table that goodput knows.", metavar="TABLE.json")
    measure_table: Path | None = option(
        None, "Measure it first (30 s), and keep it.", metavar="OUT.json"
    )
    compare_simulation: bool = option(
        False, "Simulate the same requests, too, on the latency table."
    )
    model: str | None = option(
        None, "With --base-url: name of the model; without it, the first that the server lists."
    )
    api_key: str | None = option(
        None,
        "With --base-url: key of the server; better in the environment, as others see arguments.",
        env="OPENAI_API_KEY",
    )
    trace: Path | None = option(
        None, "Goodput's decisions, a JSON line for each.", metavar="OUT.jsonl"
    )
    details: Path | None = option(None, "A JSON line for each request.", metavar="OUT.jsonl")
    args: EngineArgs = field(default_factory=EngineArgs)

    def __post_init__(self) -> None:
        check_ranges(self)

    def check(self, directory: Path | None) -> None:
        """Find what can be found before anything loads.

        Raises:
            ConfigError: a value outside its range, or options that exclude each other.
            OutputError: the directory of an output is absent.
        """
        self.check_outputs()
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
        adapts = {"--adaptive-verification": self.args.adapts_verification or None}
        self._refuse(self.base_url is None, "an engine in this process, or a simulation", adapts)
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
            "--backend": self.args.backend,
            "--verify": self.args.verify,
            "--threads": self.args.num_threads,
            "--overlap": self.args.overlaps or None,
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

    def settings(self) -> dict[str, Any]:
        """For the report; no key of a server."""
        settings = asdict(replace(self, args=EngineArgs()))
        for name in ("args", "api_key", "json", "num_prompts"):
            del settings[name]
        settings |= {
            "goodput": list(self.goodput),
            "max_num_seqs": self.args.max_num_seqs,
            "adapts_verification": self.args.adapts_verification,
            "threads": self.args.num_threads,
            "backend": self.args.backend,
            "verify": self.args.verify,
        }
        paths = {name: str(value) for name, value in settings.items() if isinstance(value, Path)}
        return settings | paths
