"""The trained hybrid with every kind of draft, beside a model of attention of the same size.

Both have the pair's draft, and lookups. Times are those of the target's pass, with what is
committed after it (of states: what is accepted is folded into them), medians of rounds that run all
cases in turn. Bytes: replay rows of a node, and what a snapshot of all states would be in their
place, of the trained hybrid and of published shapes.

    python tests/measure/hybrid.py --engines out/hybrids --json out/hybrid.json
    python tests/measure/structured.py out/hybrids/hybrid --num-prompts 4 --temperature 0
"""

from __future__ import annotations

import json
import shlex
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from specc.artifact.manifest import MANIFEST_FILE
from specc.artifact.state_entry import CONV, RECURRENCE, StateGeometry
from specc.bench.engine import EngineContender, tokenize
from specc.bench.rounds import Measurement
from specc.cli.prompts import plain_prompts
from specc.compiler.build import build
from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.speculation.plans import OFF, DynamicTree, SpecPlan
from specc.system.machine import describe_machine

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HYBRID, PAIR = EXAMPLES / "hybrid" / "target", EXAMPLES / "pair"
PLANS = (
    SpecPlan.from_widths((1,) * 4),
    SpecPlan.from_widths((2, 2, 1)),
    SpecPlan.from_dynamic(DynamicTree(12, 3, 4)),
    SpecPlan.from_widths((1,) * 6, ("suffix",)),
    SpecPlan.from_widths((1,) * 6, ("lookup-3",)),
)
BATCH = 8


def write_attention(path: Path) -> Path:
    """A random Qwen3 of as many layers and, within 1 %, parameters as the hybrid."""
    from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

    own = AutoConfig.from_pretrained(HYBRID)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=own.vocab_size,
        hidden_size=own.hidden_size,
        intermediate_size=own.intermediate_size,
        num_hidden_layers=own.num_hidden_layers,
        num_attention_heads=own.num_attention_heads,
        num_key_value_heads=own.num_attention_heads,
        head_dim=own.head_dim,
        max_position_embeddings=own.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
    )
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(path)
    for file in HYBRID.glob("tokenizer*"):
        shutil.copy(file, path)
    return path


def load(target: Path, root: Path) -> Engine:
    """An engine, compiled where there is none yet."""
    config = CompileConfig(
        plans=PLANS, dtype="float32", max_batch_size=BATCH, max_seq_len=1024, backend="cpu",
        probe=False,
    )  # fmt: skip
    if not (root / MANIFEST_FILE).exists():
        build(target, PAIR / "draft", root, config)
    return Engine.load(root, num_threads=1)


def measure(
    engines: dict[str, Engine], count: int, tokens: int, batch: int, rounds: int
) -> list[dict[str, Any]]:
    """A row for each target and plan; a first round is not counted."""
    texts, contenders = plain_prompts(PAIR / "prompts.jsonl")[:count], {}
    for name, engine in engines.items():
        ids = tokenize(engine, texts, tokens)
        batches = [ids[i : i + batch] for i in range(0, len(ids), batch)]
        for plan in (OFF.name, *(plan.name for plan in PLANS)):
            contenders[name, plan] = EngineContender(engine, plan, plan, batches, tokens)
    runs: dict[tuple[str, str], list[Measurement]] = {case: [] for case in contenders}
    for number in range(rounds + 1):
        for case, contender in contenders.items():
            measured = contender.run()
            if number:
                runs[case].append(measured)

    def ms(case: tuple[str, str], stage: str) -> float:
        return statistics.median(run.stage_ms.get(stage, 0.0) for run in runs[case])

    rows = []
    for name, plan in contenders:
        case, off = (name, plan), (name, OFF.name)
        ratios = [
            own.decode_tokens_per_s / plain.decode_tokens_per_s
            for own, plain in zip(runs[case], runs[off], strict=True)
        ]
        rows.append(
            {
                "target": name,
                "plan": plan,
                "batch_size": batch,
                "tokens_per_step": round(runs[case][-1].mean_acceptance_length or 1.0, 3),
                "tokens_per_s": round(
                    statistics.median(run.decode_tokens_per_s for run in runs[case])
                ),
                "times_off": round(statistics.median(ratios), 3),
                "target_ms": round(ms(case, "verify"), 4),
                "target_times_off": round(ms(case, "verify") / ms(off, "verify"), 3),
                "draft_ms": round(ms(case, "draft"), 4),
                "equals_off": runs[case][-1].outputs == runs[off][-1].outputs,
            }
        )
        print(rows[-1], flush=True)
    return rows


def published_shapes() -> dict[str, dict[str, int]]:
    """Bytes of a sequence's states and of a node's replay rows, by configurations of the library.

    Convolutions in bfloat16, as the checkpoints are.
    """
    from transformers import Qwen3_5TextConfig, Qwen3NextConfig

    found = {}
    for config in (Qwen3NextConfig(), Qwen3_5TextConfig()):
        heads, values = config.linear_num_key_heads, config.linear_num_value_heads
        keys, columns = config.linear_key_head_dim, config.linear_value_head_dim
        width = 2 * heads * keys + values * columns
        inputs = config.linear_conv_kernel_dim - 1
        row = heads * keys + values * columns + 2 * values
        layers = [
            StateGeometry(CONV, (inputs, width), width, "bfloat16"),
            StateGeometry(RECURRENCE, (values, keys, columns), row, "float32", heads, True),
        ]
        count = config.layer_types.count("linear_attention")
        found[f"{config.model_type}, {config.num_hidden_layers} layers"] = bytes_of(layers, count)
    return found


def bytes_of(layers: Any, count: int = 1) -> dict[str, Any]:
    """Of states that a snapshot copies, and of replay rows; of one sequence and node."""
    assert all(layer.can_be for layer in layers)
    states, rows = (
        count * sum(getattr(layer, name) for layer in layers)
        for name in ("state_bytes", "row_bytes")
    )
    return {"snapshot": states, "replay_row": rows, "times": round(states / rows, 1)}


def main(
    prompts: Annotated[int, typer.Option("--num-prompts")] = 16,
    tokens: Annotated[int, typer.Option("--tokens")] = 64,
    rounds: Annotated[int, typer.Option("--rounds")] = 5,
    folder: Annotated[Path | None, typer.Option("--engines", help="where they are kept")] = None,
    output: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Compile both, measure, print, and write the report."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        root = folder or Path(scratch)
        engines = {
            "hybrid": load(HYBRID, root / "hybrid"),
            "attention": load(write_attention(root / "target"), root / "attention"),
        }
        rows = [
            row for batch in (1, BATCH) for row in measure(engines, prompts, tokens, batch, rounds)
        ]
        manifest = engines["hybrid"].manifest
        assert manifest is not None
        own = bytes_of(manifest.models[0].state_layers)
        sizes = {name: one.manifest.models[0].num_parameters for name, one in engines.items()}
    report = {
        "command": shlex.join(["python", "tests/measure/hybrid.py", *sys.argv[1:]]),
        "machine": describe_machine(),
        "torch": torch.__version__,
        "parameters": sizes,
        "rows": rows,
        "bytes_of_a_node": {"hybrid": own, **published_shapes()},
    }
    print(report["bytes_of_a_node"], sizes)
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
