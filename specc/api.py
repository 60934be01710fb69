"""`specc.compile` and `specc.reshard`, with the probe that the command line runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from specc.compiler.build import LOSING, Compilation, build
from specc.compiler.candidate import ModelLike
from specc.compiler.reshard import reshard_engine
from specc.config import CompileConfig, CompileOptions
from specc.progress import ProgressEvent
from specc.speculation.choose_plans import Tree, choose_plans, policy_of, split_drafts
from specc.speculation.speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from torch import nn

    from specc.runtime.engine import Engine
    from specc.speculation.metrics import SpecStats

_PROBE_PROMPTS = (
    "def read_file(path):\n    ",
    "The capital of France is",
    "1, 2, 3, 4, 5,",
    "import os\nimport sys\n\n\nclass ",
)
_PROBE_TOKENS = 16
# below this share of accepted first draft tokens, a pair hardly belongs together
_LOW_ACCEPTANCE = 0.05
# steps of plain decoding that are too short to compare plans with, in a few of them
_LEAST_STEP_S = 0.005


def compile(
    target: str | Path | nn.Module,
    draft: ModelLike | Sequence[ModelLike] | None = None,
    output: str | Path = "engine",
    *,
    tree: Tree | None = None,
    num_speculative_tokens: int | None = None,
    combine: str | None = None,
    speculative_config: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
    force: bool = False,
    dump_graphs: str | Path | None = None,
    listen: Callable[[ProgressEvent], None] = lambda event: None,
    **options: Unpack[CompileOptions],
) -> Compilation:
    """Compile a target and a draft into an engine directory.

        specc.compile("target/", "draft/", "engine/", num_speculative_tokens=4)

    Args:
        target: Hugging Face directory or id, or a module (input_ids, position_ids) → logits.
        draft: a model likewise, or `self:window=W`, `lookup:N`, `suffix` or `mtp`, see
            `specc compile --help`; or a list of these. None decodes plainly.
        output: engine directory to make.
        tree: children per frontier node and level, e.g. (3, 2, 1); a `TokenTree`; or a
            `DynamicTree`, whose nodes the draft chooses anew at every step.
        num_speculative_tokens: length of a chain; instead of `tree`. Where neither is given, 4,
            and 8 where tokens are looked up.
        combine: of several drafts: `merge`, the default, `vote` or `best`.
        speculative_config: all of this as vLLM has it, {"method": …, "model": …,
            "num_speculative_tokens": …}; instead of draft, tree, num_speculative_tokens, combine.
        tokenizer: directory or tokenizer.json, where the target is a module.
        force: replace an existing engine.
        dump_graphs: directory that gets each program's graph after each phase.
        listen: called as phases begin, advance and end.
        options: fields of `specc.CompileConfig`, each with the help of its command-line option.
    Returns:
        the manifest, what each pass did, and warnings.
    Raises:
        SpeccError: found / needed / do; nothing is left behind.
    """
    models, config = with_drafts(
        CompileConfig(**cast(Any, options)),
        draft,
        [] if tree is None else [tree],
        num_speculative_tokens,
        combine,
        speculative_config,
    )
    return compile_with(
        target,
        models,
        output,
        config,
        tokenizer=tokenizer,
        force=force,
        dump_graphs=Path(dump_graphs) if dump_graphs else None,
        listen=listen,
    )


def with_drafts(
    config: CompileConfig,
    draft: ModelLike | Sequence[ModelLike] | None,
    trees: Sequence[Tree],
    num_speculative_tokens: int | None,
    combine: str | None,
    speculative_config: Mapping[str, Any] | str | None,
) -> tuple[list[ModelLike], CompileConfig]:
    """The draft models, and the options with the plans that they are for; see `compile`.

    Raises:
        ConfigError: options that contradict each other.
    """
    num_ranks = config.draft_tensor_parallel_size
    if speculative_config is not None:
        asked = SpeculativeConfig.read(speculative_config)
        asked.check_alone(
            draft=draft, tree=trees, num_speculative_tokens=num_speculative_tokens, combine=combine
        )
        draft, trees = asked.draft, asked.trees
        num_speculative_tokens = asked.num_speculative_tokens
        num_ranks = asked.num_draft_ranks(num_ranks)
    models, names = split_drafts(draft)
    plans = choose_plans(trees, num_speculative_tokens, names, combine)
    config = dataclasses.replace(
        config, plans=plans, policy=policy_of(combine, plans), draft_tensor_parallel_size=num_ranks
    )
    return models, config


def reshard(
    engine: str | Path,
    output: str | Path,
    tensor_parallel_size: int,
    *,
    pipeline_parallel_size: int | None = None,
    force: bool = False,
    probe: bool = True,
    listen: Callable[[ProgressEvent], None] = lambda event: None,
) -> Compilation:
    """Make an engine for another number of ranks out of an engine, without its checkpoint.

        specc.reshard("engine/", "engine-4/", 4)

    Args:
        engine: directory of the engine that there is, with the files of all of its ranks.
        output: engine directory to make.
        tensor_parallel_size: ranks that share the target of the new engine; 1 makes it whole.
        pipeline_parallel_size: its stages; None is as many as the engine has.
        force: replace an existing engine.
        probe: generate a few dozen tokens at the end and report acceptance.
        listen: called as phases begin, advance and end.
    Returns:
        the manifest, what each pass did, and warnings.
    Raises:
        SpeccError: found / needed / do; nothing is left behind.
    """
    return reshard_engine(
        engine,
        output,
        tensor_parallel_size,
        num_stages=pipeline_parallel_size,
        force=force,
        probe=probe_engine if probe else None,
        listen=listen,
    )


def compile_with(
    target: str | Path | nn.Module,
    drafts: Sequence[ModelLike],
    output: str | Path,
    config: CompileConfig,
    **options: Any,
) -> Compilation:
    """`build` with the probe; adds a warning where the pair hardly accepts anything."""
    compilation = build(target, drafts, output, config, probe=probe_engine, **options)
    result = compilation.manifest.probe
    if drafts and result and result["num_spec_steps"]:
        first = (result["accepted_per_depth"] or [0.0])[0]
        if first < _LOW_ACCEPTANCE:
            compilation.warnings.append(
                f"the target accepted {first:.0%} of the draft's first tokens in the probe: is"
                " this the right pair? Output stays correct, but speculation only costs time"
            )
    return compilation


def probe_engine(directory: Path) -> dict[str, Any]:
    """Generate a few dozen tokens on built-in prompts; returns acceptance figures."""
    from specc.runtime.backends.capture_limits import CaptureLimits
    from specc.runtime.engine import Engine
    from specc.runtime.llm import LLM
    from specc.sampling.generation_config import NONE
    from specc.sampling.params import SamplingParams

    # a GPU captures only what these prompts run; who compiles for ranks may have few cores
    engine = Engine.load(directory, verify=False, capture=CaptureLimits.lazy(), oversubscribes=True)
    tokenizer, room = engine.tokenizer, engine.max_seq_len // 2
    assert tokenizer is not None, "build probes engines with a tokenizer only"
    prompts = [ids for text in _PROBE_PROMPTS if (ids := tokenizer.encode(text).ids[:room])]
    params = SamplingParams(temperature=0, max_tokens=min(_PROBE_TOKENS, room), ignore_eos=True)
    found: dict[str, Any] = {}
    speed_ups: dict[str, float] = {}
    plans = [engine.default_plan, *(x for x in engine.plans if x != engine.default_plan)]
    for name in plans:
        if not (engine.plans[name].speculates or not found):
            continue
        llm = LLM(engine, plan=name, generation_config=NONE)
        outputs = llm.generate(prompts, params)
        stats = llm.get_metrics()
        found = found or {
            "num_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
            "num_spec_steps": stats.num_spec_steps,
            "mean_acceptance_length": round(stats.mean_acceptance_length, 3),
            "acceptance_rate": round(stats.acceptance_rate, 4),
            "accepted_per_depth": [round(share, 4) for share in stats.accepted_per_depth],
        }
        sequences = [[*x.prompt_token_ids, *x.outputs[0].token_ids] for x in outputs]
        ratio = _speed_up(engine, name, sequences, stats)
        if ratio is not None:
            speed_ups[name] = round(ratio, 3)
        if ratio is None or ratio >= LOSING:
            break
    return found | {"speed_ups": speed_ups}


def _speed_up(
    engine: Engine, plan: str, sequences: Sequence[Sequence[int]], stats: SpecStats
) -> float | None:
    """How many times as fast as plain decoding a run was; None where that says nothing.

    Lookups find what texts repeat, and these are too short for that; eager engines are for looking
    at results; and of steps of a few milliseconds most is not the model's.
    """
    from specc.bench.plain_speed import measure_plain

    if not engine.plans[plan].asked or engine.facts.runs_all:
        return None
    speed = measure_plain(engine, sequences, stats)
    if speed is None or speed.batch_size / speed.tokens_per_s < _LEAST_STEP_S:
        return None
    return speed.ratio(stats)
