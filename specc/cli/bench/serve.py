"""`specc bench serve`: loads for an engine, a server or the simulator, and what became of them."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.cli.bench.engine import read_prompts
from specc.cli.bench.report import command_line, put_out
from specc.cli.options.load import LoadOptions
from specc.cli.progress import make_listener
from specc.errors import ConfigError, EngineError, InputFileError
from specc.load.figures import parse_objectives
from specc.load.lengths import LengthDistribution
from specc.progress import PhaseTimer
from specc.system.extras import install_command
from specc.system.files import output_error
from specc.system.json_file import JsonError, parse_json

if TYPE_CHECKING:
    from specc.cost.latency_table import LatencyTable
    from specc.load.http_client import HttpClient
    from specc.load.report import LoadBench
    from specc.load.request import Tokenize, Workload
    from specc.load.subject import LoadSubject
    from specc.load.sweep import Sweep
    from specc.runtime.engine import Engine

# seconds in which passes are measured after a load, to tell whether the machine is the same
_AGAIN_S = 10.0


def run_bench_serve(directory: Path | None, options: LoadOptions) -> None:
    """Serve the loads, and print or write the report.

    Raises:
        SpeccError: of an option, of a prompt, of the engine, of the server.
    """
    options.check(directory)
    objectives = parse_objectives(options.goodput)
    options.arrivals()
    from specc.cli.bench.serve_table import print_load_report
    from specc.load.decisions import TraceFile
    from specc.load.report import make_load_report, result_lines

    trace = None if options.trace is None else TraceFile(options.trace)
    try:
        with make_listener() as listen:
            bench = _Bench(directory, options, objectives, PhaseTimer(listen)).run(trace)
    finally:
        if trace is not None:
            trace.close()
    report = make_load_report(bench, command_line())
    if options.details is not None:
        lines = (json.dumps(line) + "\n" for line in result_lines(bench.result))
        try:
            options.details.write_text("".join(lines), encoding="utf-8")
        except OSError as error:
            raise output_error(options.details, error) from error
    if options.plot is not None:
        from specc.draw.charts import draw_load

        draw_load(report, options.plot)
    put_out(report, replace(options, plot=None), print_load_report)


class _Bench:
    """One benchmark in progress."""

    def __init__(
        self,
        directory: Path | None,
        options: LoadOptions,
        objectives: dict[str, float],
        phases: PhaseTimer,
    ) -> None:
        self._directory = directory
        self._options = options
        self._objectives = objectives
        self._phases = phases
        self._engine: Engine | None = None
        self._table: LatencyTable | None = None
        self._acceptance: list[list[float]] | None = None

    def run(self, trace: Any) -> LoadBench:
        from specc.load.report import LoadBench, load_average
        from specc.load.sweep import run_sweep

        options = self._options
        if options.acceptance is not None:
            from specc.cost.acceptance import parse_acceptance

            self._acceptance = parse_acceptance(options.acceptance, "--acceptance")
        before = load_average()
        if self._directory is not None:
            with self._phases.phase("load engine"):
                self._engine = replace(self._options.args, engine=self._directory).load()
        self._take_table()
        subject = self._subject()
        sweep = self._sweep()
        write = None if trace is None else trace.write
        with self._phases.phase("load") as advance:
            result = run_sweep(sweep, subject, advance, write)
        predicted = drift = None
        if options.compare_simulation:
            drift = self._drift()
            with self._phases.phase("simulate") as advance:
                predicted = run_sweep(sweep, self._simulated(result), advance)
        return LoadBench(
            subject=str(options.base_url or self._directory or options.simulate),
            result=result,
            settings=options.settings() | {"policies": list(sweep.policies)},
            objectives=self._objectives,
            engine=self._engine,
            table=self._table,
            predicted=predicted,
            drift=drift,
            acceptance=self._acceptance,
            load_before=before,
        )

    def _take_table(self) -> None:
        """Read or measure the latency table; goodput starts from it, as from that of a profile."""
        options, engine = self._options, self._engine
        path = options.simulate or options.table
        if path is not None:
            self._table = read_table(path)
        elif options.measure_table is not None:
            from specc.tune.latency import measure_latency

            assert engine is not None, "checked"
            with self._phases.phase("measure passes") as advance:
                table = measure_latency(engine, advance)
            self._table = self._with_overheads(table)
            text = json.dumps(self._table.to_json(), indent=1) + "\n"
            try:
                options.measure_table.write_text(text, encoding="utf-8")
            except OSError as error:
                raise output_error(options.measure_table, error) from error
        if self._table is not None and engine is not None:
            engine.profile = {**engine.profile, "latency": self._table.to_json()}

    def _with_overheads(self, table: LatencyTable) -> LatencyTable:
        """The host's part as the requests of this load see it."""
        from specc.load.overheads import with_overheads
        from specc.load.subject import EngineSubject

        subject, sweep = self._subject(), self._sweep()
        assert isinstance(subject, EngineSubject), "a table is measured of an engine"
        requests = sweep.requests(sweep.arrivals[0].rate, 0)
        with self._phases.phase("measure the host's part") as advance:
            return with_overheads(table, subject, requests, advance)

    def _drift(self) -> float:
        """How much longer passes take now than in the table that the simulation stands on."""
        from specc.tune.latency import measure_latency

        assert self._engine is not None, "checked"
        assert self._table is not None, "checked"
        with self._phases.phase("measure passes again") as advance:
            now = measure_latency(self._engine, advance, _AGAIN_S)
        key = "seconds_by_tokens"
        before, after = self._table.target.to_json()[key], now.target.to_json()[key]
        shared = [after[size] / before[size] for size in after if before.get(size)]
        return statistics.median(shared) if shared else 1.0

    def _subject(self) -> LoadSubject:
        from specc.load.subject import EngineSubject, ServerSubject

        options = self._options
        if options.simulate is not None:
            return self._simulated(None)
        if options.base_url is not None:
            return ServerSubject(_client(options), options.limits(), options.warmup)
        assert self._engine is not None, "checked"
        return EngineSubject(
            self._engine,
            options.limits(),
            options.warmup,
            options.temperature,
            options.seed,
            options.share_prefixes,
            options.args.adapts_verification,
        )

    def _simulated(self, measured: Any) -> LoadSubject:
        """The simulator, with dice as given, or else as the runs turned out."""
        from specc.load.simulated import SimulatedSubject, limits_of, measured_acceptance, plans_of
        from specc.simulate.simulator import Limits

        assert self._table is not None, "checked"
        plans = self._engine.plans if self._engine else plans_of(self._policies())
        if self._engine is not None:
            limits = limits_of(self._engine)
        else:
            limits = Limits(max_num_seqs=self._options.args.max_num_seqs or Limits.max_num_seqs)
        if self._acceptance is None:
            assert measured is not None, "checked"
            counted = measured.counted(plans)
            self._acceptance = measured_acceptance(counted, plans)
        profile = self._engine.profile.get("acceptance") if self._engine else None
        options = self._options
        return SimulatedSubject(
            self._table,
            plans,
            limits,
            self._acceptance,
            options.seed,
            profile,
            options.args.adapts_verification,
        )

    def _policies(self) -> list[str]:
        """As asked for; else what `specc serve` would use."""
        from specc.load.subject import SERVER
        from specc.runtime.policies.named import GOODPUT

        options = self._options
        if options.policies is not None:
            return list(dict.fromkeys(name.strip() for name in options.policies.split(",")))
        if options.base_url is not None:
            return [SERVER]
        if self._engine is not None and len(self._engine.plans) == 1:
            return list(self._engine.plans)
        return [GOODPUT]

    def _sweep(self) -> Sweep:
        from specc.load.sweep import Sweep

        options = self._options
        return Sweep(options.arrivals(), self._policies(), self._workload(), options.rounds)

    def _workload(self) -> Workload:
        from specc.load.request import Workload

        options = self._options
        prompt_tokens = None
        if options.prompt_tokens is not None:
            prompt_tokens = LengthDistribution.parse(options.prompt_tokens, "--prompt-tokens")
        given = read_prompts(options, self._engine)
        texts = [text if isinstance(text, str) else tuple(text) for text in given]
        tokenize = self._tokenize()
        if options.simulate is not None and tokenize is None:
            texts = []
        return Workload(
            num_requests=options.num_requests,
            output_tokens=LengthDistribution.parse(options.output_tokens, "--output-tokens"),
            prompt_tokens=prompt_tokens,
            texts=texts,
            tokenize=tokenize,
            max_seconds=options.max_seconds,
            seed=options.seed,
        )

    def _tokenize(self) -> Tokenize | None:
        if self._engine is None:
            return None
        from specc.runtime.requests.request_maker import RequestMaker

        maker = RequestMaker(self._engine, None)
        return lambda text: maker.tokenize(text) if isinstance(text, str) else [*text]


def _client(options: LoadOptions) -> HttpClient:
    """What sends a load to a server.

    Raises:
        ConfigError: no address of a server, or the client's packages are not installed.
    """
    try:
        from specc.load.http_client import HttpClient, parse_base_url
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("specc"):
            raise
        raise ConfigError(
            f"--base-url, and no package {error.name}",
            "the packages of a load's client",
            install_command("bench"),
        ) from error
    return HttpClient(
        parse_base_url(options.base_url or ""),
        options.model,
        options.api_key,
        options.temperature,
        options.seed,
    )


def read_table(path: Path) -> LatencyTable:
    """Read a latency table.

    Raises:
        InputFileError: the file cannot be read.
        EngineError: it holds no latency table.
    """
    from specc.cost.latency_table import LatencyTable

    try:
        data = parse_json(path.read_bytes())
    except OSError as error:
        raise InputFileError(
            f"{path} cannot be read ({error.strerror or error})", "a latency table", "correct it"
        ) from error
    except JsonError as error:
        raise EngineError(
            f"{path} holds no JSON ({error})",
            "a latency table",
            "measure one with specc bench serve ENGINE --measure-table FILE",
        ) from error
    return LatencyTable.from_json(data)
