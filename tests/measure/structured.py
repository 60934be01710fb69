r"""Structured outputs under speculation: are they valid, as without it, and how many tokens a step?

Every prompt is completed under every schema, by every plan of the engine, greedy and sampled by the
rule coupled, with `--unmasked` once more with drafts that know nothing of the grammar. Outputs are
validated by the package jsonschema, which knows nothing of the library that makes the masks, and
compared with those of plan off. Prompts are the lines of the files, each cut at up to three places,
so that there are enough of them.

    specc compile --target examples/pair/target --draft examples/pair/draft --tree 1,1,1,1 \
        --tree 3,2,1 --tree dynamic:8,3,3 -o out/structured
    python tests/measure/structured.py out/structured --json out/structured.json
"""

from __future__ import annotations

import datetime
import json
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import jsonschema
import llguidance
import torch
import typer

from specc.cli.prompts import plain_prompts
from specc.runtime.constraints.draft_masks import DraftMasks
from specc.runtime.constraints.grammar_masks import TreeMasks
from specc.runtime.constraints.mask_maker import MaskMaker
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.outputs.request_output import CompletionOutput
from specc.sampling.params import SamplingParams
from specc.sampling.structured import StructuredOutputsParams
from specc.speculation.plans import OFF
from specc.system.machine import describe_machine

PAIR = Path("examples/pair")
FILES = [PAIR / f"prompts{name}.jsonl" for name in ("", "_unused", "_repetitive")]
CUTS = (1.0, 0.7, 0.4)
# parts of JSON may have one space between them: with any number, a small model goes on for ever
WHITESPACE = " ?"
_TEXT = {"type": "string", "maxLength": 24}


def record(required: bool = True, **properties: Any) -> dict[str, Any]:
    """An object of these properties and no other."""
    names = list(properties) if required else []
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


# every text and list is bounded, so that every output ends
SCHEMAS: dict[str, dict[str, Any]] = {
    "record": record(
        name=_TEXT,
        line={"type": "integer", "minimum": 0, "maximum": 9999},
        is_public={"type": "boolean"},
        summary={"anyOf": [_TEXT, {"type": "null"}]},
    ),
    "label": record(
        kind={"enum": ["class", "function", "import", "comment"]},
        confidence={"type": "integer", "minimum": 0, "maximum": 100},
    ),
    "nested": record(
        module=_TEXT,
        functions={
            "type": "array",
            "maxItems": 3,
            "items": record(name=_TEXT, arguments={"type": "array", "items": _TEXT, "maxItems": 3}),
        },
    ),
    "choice-of-objects": {
        "anyOf": [
            record(error={"const": True}, message=_TEXT),
            record(error={"const": False}, values={"$ref": "#/$defs/values"}),
        ],
        "$defs": {
            "values": {
                "type": "array",
                "items": {"type": "integer", "minimum": -99, "maximum": 99},
                "minItems": 1,
                "maxItems": 5,
            }
        },
    },
    "formats": record(
        id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        date={"type": "string", "format": "date"},
        version={"type": "string", "pattern": "^[0-9]{1,2}(\\.[0-9]{1,2}){1,2}$"},
    ),
}


@dataclass
class Costs:
    """Of masks, over all steps of a measurement; the first tokens' masks count, too.

    `hook_s` is what drafts and verification wait for, `num_hooks` are the verifications.
    """

    num_masks: int = 0
    mask_s: float = 0.0
    num_hooks: int = 0
    hook_s: float = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count all masks that are made, and all hooks, meanwhile."""
        make, hook, drafts = MaskMaker.make, TreeMasks.__call__, DraftMasks.__call__

        def timed_mask(maker: MaskMaker, matcher: Any) -> bytes | None:
            begin = time.perf_counter()
            found = make(maker, matcher)
            self.mask_s += time.perf_counter() - begin
            self.num_masks += 1
            return found

        def timed_hook(masks: TreeMasks, values: Any) -> None:
            begin = time.perf_counter()
            hook(masks, values)
            self.hook_s += time.perf_counter() - begin
            self.num_hooks += 1

        def timed_drafts(masks: DraftMasks, inputs: Any, logits: Any) -> Any:
            begin = time.perf_counter()
            found = drafts(masks, inputs, logits)
            self.hook_s += time.perf_counter() - begin
            return found

        with (
            mock.patch.object(MaskMaker, "make", timed_mask),
            mock.patch.object(TreeMasks, "__call__", timed_hook),
            mock.patch.object(DraftMasks, "__call__", timed_drafts),
        ):
            yield


@contextmanager
def unmasked_drafts() -> Iterator[None]:
    """Drafts propose what they like meanwhile: masks come with verification alone."""
    with mock.patch.object(DraftMasks, "of", return_value=None):
        yield


def read_prompts(files: list[Path], count: int) -> list[str]:
    """Lines of the files, whole ones first, then their beginnings; all distinct.

    Raises:
        SystemExit: there are fewer.
    """
    lines = [line for file in files for line in plain_prompts(file)]
    texts = [line[: int(len(line) * cut)] + "\n\nrecord = " for cut in CUTS for line in lines]
    found = list(dict.fromkeys(texts))[:count]
    if len(found) < count:
        raise SystemExit(f"{len(found)} prompts in these files, {count} wanted")
    return found


def is_valid(output: CompletionOutput, schema: dict[str, Any]) -> bool:
    """Whether an output is complete and JSON of its schema."""
    if output.finish_reason != "stop":
        return False
    try:
        jsonschema.validate(
            json.loads(output.text), schema, format_checker=jsonschema.FormatChecker()
        )
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def complete(
    llm: LLM, prompts: list[str], params: SamplingParams, schema: dict[str, Any] | None
) -> list[CompletionOutput]:
    """Outputs of all prompts; request i is drawn with seed i."""
    structure = None
    if schema is not None:
        structure = StructuredOutputsParams(json=schema, whitespace_pattern=WHITESPACE)
    each = [replace(params, seed=i, structured_outputs=structure) for i in range(len(prompts))]
    return [output.outputs[0] for output in llm.generate(prompts, each)]


def measure_plan(
    engine: Engine,
    plan: str,
    prompts: list[str],
    params: SamplingParams,
    wanted: dict[str, list[list[int]]],
) -> dict[str, Any]:
    """Complete all prompts under all schemas with one plan.

    `wanted` is schema → tokens of plan off, filled by the first call.
    """
    costs, rows = Costs(), {}
    begin = time.perf_counter()
    total_steps = 0
    for name, schema in SCHEMAS.items():
        llm = LLM(engine, plan=plan)
        with costs.counted():
            outputs = complete(llm, prompts, params, schema)
        stats = llm.get_metrics()
        total_steps += stats.num_step_passes
        tokens = [output.token_ids for output in outputs]
        same = wanted.setdefault(name, tokens)
        rows[name] = {
            "num_valid": sum(is_valid(output, schema) for output in outputs),
            "num_as_off": sum(own == other for own, other in zip(tokens, same, strict=True)),
            "num_distinct": len({output.text for output in outputs}),
            "mean_output_tokens": round(sum(map(len, tokens)) / len(tokens), 1),
            "tokens_per_step": round(stats.mean_acceptance_length or 1.0, 3),
        }
    elapsed_s = time.perf_counter() - begin
    free = LLM(engine, plan=plan)
    complete(free, prompts[:40], replace(params, max_tokens=48), None)
    return {
        "plan": plan,
        "drafts": "masked",
        "temperature": params.temperature,
        "num_outputs": len(prompts) * len(SCHEMAS),
        "num_valid": sum(row["num_valid"] for row in rows.values()),
        "num_as_off": sum(row["num_as_off"] for row in rows.values()),
        "tokens_per_step": round(statistics.mean(r["tokens_per_step"] for r in rows.values()), 3),
        "tokens_per_step_without_a_grammar": round(
            free.get_metrics().mean_acceptance_length or 1.0, 3
        ),
        "microseconds_per_mask": round(costs.mask_s / costs.num_masks * 1e6, 1),
        "masks_per_step": round(costs.num_masks / total_steps, 1),
        "microseconds_per_step": round(costs.hook_s / costs.num_hooks * 1e6),
        "share_of_time": round(costs.hook_s / elapsed_s, 3),
        "schemas": rows,
    }


def show(row: dict[str, Any]) -> None:
    """Print a row, without its schemas."""
    brief = {name: value for name, value in row.items() if name != "schemas"}
    print(json.dumps(brief), flush=True)


def main(
    engine_dir: Annotated[Path, typer.Argument(metavar="ENGINE")],
    files: Annotated[list[Path] | None, typer.Option("--prompts")] = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts")] = 200,
    max_tokens: Annotated[int, typer.Option("--max-tokens")] = 400,
    temperatures: Annotated[list[float] | None, typer.Option("--temperature")] = None,
    compares: Annotated[bool, typer.Option("--unmasked", help="also unmasked drafts")] = False,
    output: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure structured outputs of an engine."""
    engine = Engine.load(engine_dir, num_threads=1)
    prompts = read_prompts(files or FILES, num_prompts)
    rows = []
    for temperature in temperatures or [0.0, 1.0]:
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
        wanted: dict[str, list[list[int]]] = {}
        for plan in (OFF.name, *(name for name in engine.plans if name != OFF.name)):
            rows.append(measure_plan(engine, plan, prompts, params, wanted))
            show(rows[-1])
            if compares and engine.plans[plan].speculates:
                with unmasked_drafts():
                    row = measure_plan(engine, plan, prompts, params, wanted)
                rows.append(row | {"drafts": "unmasked"})
                show(rows[-1])
    report = {
        "command": shlex.join(["python", "tests/measure/structured.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "versions": {"torch": torch.__version__, "llguidance": llguidance.__version__},
        "backend": engine.backend,
        "batch_size": engine.cache.shape.max_num_seqs,
        "num_prompts": len(prompts),
        "max_tokens": max_tokens,
        "whitespace_pattern": WHITESPACE,
        "runs": rows,
    }
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
