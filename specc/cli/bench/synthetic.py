"""`specc bench --synthetic`: shapes of models with random weights, and what their steps cost."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from specc.artifact.mixes import MIXES
from specc.bench.peers.names import TRANSFORMERS
from specc.cli.bench.report import command_line
from specc.cli.bench.shape_plans import choose_shape_plans, head_of
from specc.cli.progress import make_listener
from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.progress import PhaseTimer
from specc.quantize_options import FLOATS, layout_of
from specc.speculation.plans import SpecPlan
from specc.system.extras import install_command

if TYPE_CHECKING:
    from specc.artifact.in_memory import BenchModel, BenchPrograms
    from specc.bench.rounds import Contender
    from specc.bench.steps import StepBench, StepFigures
    from specc.bench.synthetic.report import ShapesBench, ShapesSettings
    from specc.bench.synthetic.shapes import Shape
    from specc.cli.options.bench import BenchOptions, ShapesOptions
    from specc.compiler.in_memory import ShapeOptions
    from specc.runtime.engine import Engine

_SEED = 1


def run_shapes_bench(options: ShapesOptions, common: BenchOptions) -> None:
    """Measure, and print or write the report.

    Raises:
        SpeccError: of an option, of a shape, or of the device's memory.
    """
    common.check_outputs()
    for name in common.against:
        if name != TRANSFORMERS:
            raise ConfigError(
                f"--against {name} with --synthetic",
                f"{TRANSFORMERS}, which runs modules with random weights",
                f"leave it out, or measure an engine: {name} reads checkpoints",
            )
    for name, layout in zip(("--quantize", "--draft-quantize"), layouts_of(options), strict=True):
        if layout not in (None, FLOATS) and common.against:
            raise ConfigError(
                f"--against {TRANSFORMERS} with --synthetic and {name} {layout}",
                f"modules of {TRANSFORMERS} that hold such weights: there are none",
                f"leave out --against {TRANSFORMERS}, or {name}",
            )
    with make_listener() as listen:
        report = measure_shapes(options, common, PhaseTimer(listen))
    from specc.cli.bench.report import put_out
    from specc.cli.bench.synthetic_table import print_shapes_report

    put_out(report, common, print_shapes_report)


def measure_shapes(
    options: ShapesOptions,
    common: BenchOptions,
    phases: PhaseTimer,
    on_steps: Callable[[str, dict[str, Any]], object] = lambda plan, figures: None,
) -> dict[str, Any]:
    """Compile the shapes, draw weights, measure, and make the report.

    Steps by themselves come first, then rounds: what is cut off has them.

    Args:
        common: options of every benchmark.
        phases: tells the listener how far this is.
        on_steps: called with a plan and its part of the report as soon as its steps are timed, and
            again when their parts are known.
    """
    import torch

    from specc.bench.device import TimedGraphs, measure_copy_bandwidth, open_device
    from specc.bench.rounds import run_rounds
    from specc.bench.steps import StepBench
    from specc.bench.synthetic.engine import check_memory, make_engine
    from specc.bench.synthetic.report import ShapesBench, make_shapes_report, step_report

    device, backend = open_device()
    if common.args.num_threads is not None:
        torch.set_num_threads(common.args.num_threads)
    programs = compile_for(options, common, phases, backend)
    compile_s = sum(phases.seconds.values())
    check_memory(programs, _extra_bytes(programs, common, device), device.free_bytes())
    with phases.phase("copy bandwidth"):
        bandwidth = measure_copy_bandwidth(device.device)
    with phases.phase("draw weights"):
        weights = _draw_weights(programs.models, device.device)
    graphs = TimedGraphs(device)
    with phases.phase("choose products"):
        engine = make_engine(programs, weights, graphs, backend)
    prompts = _draw_prompts(programs, common.batch_size, options.num_context)
    steps = StepBench(engine, graphs, options.num_context, common.tokens)
    bench = ShapesBench(
        programs=programs,
        engine=engine,
        settings=_settings(options, common),
        prompts=prompts,
        bandwidth=bandwidth,
        compile_s=compile_s,
    )
    for plan, figures, notes in _time_steps(steps, programs, common.rounds, phases):
        bench.steps[plan] = figures
        bench.notes += notes
        on_steps(plan, step_report(bench, plan))
    for plan in bench.steps:
        with phases.phase(f"parts of {plan}"):
            bench.notes += _add_parts(bench, steps, plan, common.rounds)
        on_steps(plan, step_report(bench, plan))
    contenders, notes = _contenders(engine, programs, prompts, common, phases)
    bench.notes += notes
    with phases.phase("rounds") as advance:
        bench.rounds = run_rounds(contenders, common.rounds, common.warmup, advance)
    return make_shapes_report(bench, command_line())


def compile_for(
    options: ShapesOptions, common: BenchOptions, phases: PhaseTimer, backend: str
) -> BenchPrograms:
    """Programs of the shapes and steps of the plans that were asked for.

    Args:
        common: options of every benchmark.
        phases: tells the listener how far this is.
        backend: whose phases the programs go through.
    Raises:
        SpeccError: of an option or of a shape.
    """
    from specc.bench.synthetic.shapes import parse_shapes

    assert options.synthetic is not None, "somebody named shapes"
    acceptance = common.settings().synthetic_acceptance
    shapes = [shape for shape in parse_shapes(options.synthetic) if shape is not None]
    plans = choose_shape_plans(options, acceptance, len(shapes) > 1)
    _require_transformers(options.synthetic)
    head = head_of(options, len(shapes) > 1)
    return _compile(shapes, head, _shape_options(options, common, plans, backend), phases)


def _shape_options(
    options: ShapesOptions, common: BenchOptions, plans: tuple[SpecPlan, ...], backend: str
) -> ShapeOptions:
    """Raises ConfigError: a dtype, a batch size or a layout of weights that no engine has."""
    from specc.artifact.backends import facts_of
    from specc.compiler.in_memory import ShapeOptions

    acceptance = common.settings().synthetic_acceptance
    dtype = options.dtype or ("bfloat16" if facts_of(backend).is_on_gpu else "float32")
    CompileConfig(dtype=dtype, max_batch_size=common.batch_size)
    layout, of_draft = layouts_of(options)
    return ShapeOptions(
        plans=plans,
        dtype=dtype,
        batch_size=common.batch_size,
        context=options.num_context,
        tokens=common.tokens,
        backend=backend,
        acceptance=None if acceptance is None else tuple(acceptance),
        quantization=layout,
        draft_quantization=of_draft,
        weight_fragments=options.weight_fragments,
    )


def layouts_of(options: ShapesOptions) -> tuple[str | None, str | None]:
    """Names of the layouts of projections' weights, of the target and of the draft.

    None where they are not quantized; of a draft, where `--draft-quantize` says nothing of it.

    Raises:
        ConfigError: there is no such layout, or it is a mix of several.
    """
    target, draft, group = options.quantize, options.draft_quantize, options.quantize_group
    for name, kind in (("--quantize", target), ("--draft-quantize", draft)):
        if kind in MIXES:
            raise ConfigError(
                f"{name} {kind} with --synthetic",
                "int8, int4 or fp8: random weights have one layout",
                "choose one of them, or compile a checkpoint with it and measure that engine",
            )
    asked = () if draft is None else (draft,)
    config = CompileConfig(quantize=target, draft_quantize=asked, quantize_group=group)
    return config.quantization, draft if draft == FLOATS else layout_of(draft, group)


def _settings(options: ShapesOptions, common: BenchOptions) -> ShapesSettings:
    import torch

    from specc.bench.synthetic.report import ShapesSettings

    layout, of_draft = layouts_of(options)
    return ShapesSettings(
        synthetic=str(options.synthetic),
        draft=options.draft,
        context=options.num_context,
        tokens=common.tokens,
        batch_size=common.batch_size,
        rounds=common.rounds,
        warmup=common.warmup,
        threads=torch.get_num_threads(),
        synthetic_acceptance=common.settings().synthetic_acceptance,
        against=TRANSFORMERS if common.against else None,
        quantize=layout,
        draft_quantize=of_draft,
        weight_fragments=options.weight_fragments,
    )


def _require_transformers(synthetic: str) -> None:
    """Modules come from there; weights and files do not."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"--synthetic {synthetic}, and no transformers",
            "transformers, whose models are compiled",
            install_command("compile"),
        )


def _compile(
    shapes: Sequence[Shape], head: str | None, options: ShapeOptions, phases: PhaseTimer
) -> BenchPrograms:
    """Programs of the shapes, after what can be refused before minutes of tracing."""
    from specc.bench.synthetic.drafters import make_head
    from specc.bench.synthetic.shapes import check_vocabularies
    from specc.compiler.in_memory import compile_shapes, load_config

    configs = [
        shape.make_config() if shape.directory is None else load_config(shape.directory)
        for shape in shapes
    ]
    for config in configs:
        # random weights end nowhere; a checkpoint's ids would stop transformers
        config.bos_token_id = config.eos_token_id = None
    if len(shapes) == 2:
        check_vocabularies(configs[0], configs[1], (shapes[0], shapes[1]))
    made = None if head is None else make_head(head, shapes[0].label, configs[0])
    return compile_shapes([shape.label for shape in shapes], configs, options, phases, made)


def _extra_bytes(programs: BenchPrograms, common: BenchOptions, device: Any) -> int:
    """Memory beside programs: a copy, and transformers' own caches for the same sequences."""
    from specc.bench.device import COPY_BYTES

    # a growing and a static cache, and what its passes hold
    own = sum(2 * m.memory.cache + m.memory.workspace + m.memory.logits for m in programs.models)
    return 2 * COPY_BYTES[device.device.type] + (own if common.against else 0)


def _draw_weights(models: Sequence[BenchModel], device: Any) -> dict[str, dict[str, Any]]:
    from specc.bench.synthetic.weights import make_weights

    return {
        model.entry.name: make_weights(model, device, seed) for seed, model in enumerate(models)
    }


def _draw_prompts(programs: BenchPrograms, batch_size: int, context: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(_SEED)
    shape = (batch_size, context)
    vocab_size = programs.models[0].entry.vocab_size
    return torch.randint(0, vocab_size, shape, generator=generator).tolist()


def _contenders(
    engine: Engine,
    programs: BenchPrograms,
    prompts: list[list[int]],
    common: BenchOptions,
    phases: PhaseTimer,
) -> tuple[list[Contender], list[str]]:
    from specc.bench.baseline import ASSISTED, make_contenders
    from specc.bench.engine import EngineContender
    from specc.bench.rounds import OFF, SPECULATIVE

    batches, tokens = [prompts], common.tokens
    contenders: list[Contender] = [EngineContender(engine, OFF, OFF, batches, tokens)]
    plans = [plan for plan in programs.plans if plan.speculates]
    contenders += [
        EngineContender(engine, SPECULATIVE, plan.name, batches, tokens) for plan in plans
    ]
    if not common.against:
        return contenders, []
    target, *drafts = programs.models
    heads = [model for model in drafts if model.entry.reads_hidden]
    with phases.phase("prepare transformers"):
        baselines, notes = make_contenders(
            target.module,
            drafts[0].module if drafts and not heads else None,
            batches,
            tokens,
            plans[0].max_depth if plans else 0,
        )
    left_out = [
        f"{ASSISTED} is left out: it has no draft like {model.entry.source}, a head"
        for model in heads
    ]
    return [*contenders, *baselines], [*left_out, *notes]


def _time_steps(
    bench: StepBench, programs: BenchPrograms, rounds: int, phases: PhaseTimer
) -> Iterator[tuple[str, StepFigures, list[str]]]:
    """Each plan, its figures, and why it runs operator by operator, if it does.

    Off first, which the others are compared with, and which is there before they compile anything.
    """
    from specc.bench.rounds import OFF

    for plan in sorted(programs.steps, key=lambda name: name != OFF):
        with phases.phase(f"capture {plan}"):
            reason = bench.capture(plan)
        with phases.phase(f"steps of {plan}"):
            figures = bench.time(plan, rounds)
        yield plan, figures, [] if reason is None else [reason]


def _add_parts(bench: ShapesBench, steps: StepBench, plan: str, rounds: int) -> list[str]:
    """Measure a plan's steps with drawn tokens, and their parts; a note for each that fails."""
    stages = [stage["name"] for stage in bench.programs.steps[plan]["stages"]]
    notes = []
    for what, add in (
        ("steps that draw tokens", lambda found: steps.add_sampled(plan, found, rounds)),
        ("stages and kernels", lambda found: steps.add_parts(plan, found, stages, rounds)),
    ):
        try:
            bench.steps[plan] = add(bench.steps[plan])
        except Exception as error:
            # further captures, and a profiler that some machines refuse: what is timed stays
            reason = next(iter(str(error).splitlines()), "")
            notes.append(f"{plan}: {what} were not measured ({type(error).__name__}: {reason})")
    return notes
