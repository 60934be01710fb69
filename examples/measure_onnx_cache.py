"""What keeping KV caches in place is worth to an ONNX engine: the same engine with copies instead.

Every round generates with each way of handling caches, in an order that rotates, and every way has
to give the same tokens. Speeds are tokens a second of whole generations, relative to specc's own
way in the same round; figures are medians.

    in place      specc: TensorScatter into caches that are bound as input and output
    whole copies  the same file run without binding: onnxruntime copies every cache in every pass
    past/present  past keys as input, Concat inside of Attention, present keys as output
    unfused       past/present as exporters write it for older opsets: Concat, repeated key heads,
                  MatMul, Softmax, MatMul
    backend cpu   compiled code of the same models and plans, with --cpu-engine

    python examples/measure_onnx_cache.py ENGINE --prompts prompts.jsonl --json out.json
"""

from __future__ import annotations

import contextlib
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx
import onnxruntime
import torch
import typer
from onnx import helper, numpy_helper
from torch import Tensor

from specc.cli.prompts import plain_prompts
from specc.runtime.backends.onnx.program import OnnxProgram, any_length
from specc.runtime.backends.padded.padded_batch import PaddedBatch, named_inputs
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.system.machine import describe_machine

IN_PLACE, WHOLE, PAST, UNFUSED = "in place", "whole copies", "past/present", "unfused"
CPU = "backend cpu"
FOLDER = "session.model_external_initializers_file_folder_path"


def to_past_present(file: Path, is_fused: bool) -> bytes:
    """The model with past keys and values as inputs and present ones as outputs."""
    model = onnx.load_from_string(any_length(file))
    graph = model.graph
    writes = {node.output[0]: node for node in graph.node if node.op_type == "TensorScatter"}
    nodes, added = [], []
    for node in graph.node:
        if node.op_type == "TensorScatter":
            continue
        if node.op_type != "Attention":
            nodes.append(node)
            continue
        k, v = (writes[node.input[i]] for i in (1, 2))
        if is_fused:
            node.input[1], node.input[2] = k.input[1], v.input[1]
            node.input.extend([k.input[0], v.input[0]])
            del node.output[1:]
            node.output.extend([k.output[0], v.output[0]])
            nodes.append(node)
        else:
            nodes += unfused_attention(node, k, v, added)
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(added)
    kept = [value for value in graph.input if value.name != "write_index"]
    for value in (*kept, *graph.output):
        dims = value.type.tensor_type.shape.dim
        if value.name.startswith("mask"):
            dims[3].dim_param = "total"
        elif "_cache_" in value.name:
            dims[2].dim_param = "total" if value.name.endswith("_out") else "past"
    del graph.input[:]
    graph.input.extend(kept)
    return model.SerializeToString()


def unfused_attention(node: Any, k: Any, v: Any, added: list[Any]) -> list[Any]:
    """Attention as several nodes; heads of keys and values are repeated for the queries'."""
    name = node.output[0]
    scale = next(a.f for a in node.attribute if a.name == "scale")

    def constant(suffix: str, value: np.ndarray) -> str:
        added.append(numpy_helper.from_array(value, f"{name}.{suffix}"))
        return added[-1].name

    made = []

    def add(op: str, inputs: list[str], suffix: str, output: str = "", **attributes: Any) -> str:
        output = output or f"{name}.{suffix}"
        made.append(helper.make_node(op, inputs, [output], **attributes))
        return output

    repeated = []
    heads = add("Shape", [node.input[0]], "heads", start=1, end=2)
    for part, write in (("k", k), ("v", v)):
        whole = add("Concat", list(write.input[:2]), part, output=write.output[0], axis=2)
        own = add("Shape", [whole], f"{part}_heads", start=1, end=2)
        group = add("Div", [heads, own], f"{part}_group")
        one = constant(f"{part}_one", np.array([1], dtype=np.int64))
        shape = add("Concat", [one, one, group, one, one], f"{part}_shape", axis=0)
        place = constant(f"{part}_two", np.array([2], dtype=np.int64))
        wide = add("Expand", [add("Unsqueeze", [whole, place], f"{part}_5d"), shape], f"{part}_x")
        zero = constant(f"{part}_zero", np.array([0], dtype=np.int64))
        rest = add("Shape", [whole], f"{part}_rest", start=2)
        target = add("Concat", [zero, heads, rest], f"{part}_flat", axis=0)
        repeated.append(add("Reshape", [wide, target], f"{part}_repeated"))
    turned = add("Transpose", [repeated[0]], "kt", perm=[0, 1, 3, 2])
    scores = add("MatMul", [node.input[0], turned], "scores")
    factor = constant("scale", np.array(scale, dtype=np.float32))
    least = constant("least", np.array(-3e38, dtype=np.float32))
    scores = add("Where", [node.input[3], add("Mul", [scores, factor], "scaled"), least], "masked")
    probs = add("Softmax", [scores], "probs", axis=-1)
    add("MatMul", [probs, repeated[1]], "out", output=name)
    return made


class PastPresent:
    """Runs a model's passes with past keys copied out of the engine's caches, and new ones back."""

    def __init__(self, file: Path, program: OnnxProgram, is_fused: bool) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        options.add_session_config_entry(FOLDER, str(file.parent))
        source = to_past_present(file, is_fused)
        self.session = onnxruntime.InferenceSession(
            source, options, providers=["CPUExecutionProvider"]
        )
        self.program = program

    def __call__(self, first: int, batch: int, given: PaddedBatch) -> Tensor:
        nodes = given.tokens.shape[1]
        starts = given.write_index.tolist()
        past = max(starts)
        feed = {k: v.numpy() for k, v in named_inputs(given).items() if k != "write_index"}
        for reach, mask in given.masks.items():
            old = mask[..., :past].clone()
            for b, start in enumerate(starts):
                old[b, :, :, start:] = False
            new = [mask[b, :, :, s : s + nodes] for b, s in enumerate(starts)]
            feed[reach.mask_input] = torch.cat([old, torch.stack(new)], dim=-1).numpy()
        caches = self.program._caches
        for name, cache in caches.items():
            feed[name] = cache[first : first + batch, :, :past].contiguous().numpy()
        names = [item.name for item in self.session.get_outputs()]
        found = dict(zip(names, self.session.run(None, feed), strict=True))
        for name, cache in caches.items():
            present = torch.from_numpy(found[f"{name}_out"])
            for b, start in enumerate(starts):
                cache[first + b, :, start : start + nodes] = present[b, :, past:]
        return torch.from_numpy(found["logits"]).to(self.program.dtype)


def run_with_copies(program: OnnxProgram) -> Callable[[int, int, PaddedBatch], Tensor]:
    """The program's own session without binding: it returns copies of whole caches."""

    def run(first: int, batch: int, given: PaddedBatch) -> Tensor:
        caches = program._caches
        feed = {name: value.numpy() for name, value in named_inputs(given).items()}
        feed |= {name: cache[first : first + batch].numpy() for name, cache in caches.items()}
        names = [item.name for item in program._session.get_outputs()]
        found = dict(zip(names, program._session.run(None, feed), strict=True))
        for name, cache in caches.items():
            cache[first : first + batch] = torch.from_numpy(found[f"{name}_out"])
        return torch.from_numpy(found["logits"]).to(program.dtype)

    return run


@contextlib.contextmanager
def caches_by(ways: dict[OnnxProgram, Any]) -> Iterator[None]:
    """Let programs run in another way for a while."""
    for program, run in ways.items():
        program.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        for program in ways:
            program.__dict__.pop("run", None)


def main(
    engine_dir: Annotated[Path, typer.Argument(metavar="ENGINE")],
    prompts: Annotated[Path, typer.Option("--prompts")],
    batch: Annotated[int, typer.Option("--batch-size")] = 1,
    num_prompts: Annotated[int, typer.Option("--num-prompts")] = 8,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", help="Prompts of this length, repeated.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens")] = 64,
    rounds: Annotated[int, typer.Option("--rounds")] = 5,
    cpu_engine: Annotated[Path | None, typer.Option("--cpu-engine")] = None,
    output: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure an ONNX engine with its caches in place and with copies."""
    engine = Engine.load(engine_dir, num_threads=1, max_num_seqs=batch)
    assert engine.manifest is not None
    assert engine.backend == "onnx", "compile with --backend onnx"
    programs = [engine.target, *engine.drafts]
    files = [engine_dir / model.onnx_file for model in engine.manifest.models]
    ways: dict[str, dict[Any, Any]] = {
        IN_PLACE: {},
        WHOLE: {program: run_with_copies(program) for program in programs},  # type: ignore[arg-type]
    }
    for name, is_fused in ((PAST, True), (UNFUSED, False)):
        ways[name] = {
            program: PastPresent(file, program, is_fused)  # type: ignore[arg-type]
            for file, program in zip(files, programs, strict=True)
        }
    compiled = None
    if cpu_engine is not None:
        compiled = Engine.load(cpu_engine, num_threads=1, max_num_seqs=batch)
        ways[CPU] = {}
    texts = plain_prompts(prompts)[:num_prompts]
    assert engine.tokenizer is not None
    tokens = [engine.tokenizer.encode(text).ids for text in texts]
    if prompt_tokens is not None:
        tokens = [(ids * (prompt_tokens // len(ids) + 1))[:prompt_tokens] for ids in tokens]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    report: dict[str, Any] = {"plans": {}}
    for plan in engine.plans:
        llms = dict.fromkeys(ways, LLM(engine, plan=plan))
        if compiled is not None:
            llms[CPU] = LLM(compiled, plan=plan)
        wanted = None
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            order = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
            for name in order:
                with caches_by(ways[name]):
                    begin = time.perf_counter()
                    outputs = llms[name].generate(tokens, params)
                    took = time.perf_counter() - begin
                found = [o.outputs[0].token_ids for o in outputs]
                wanted = wanted or found
                assert found == wanted, f"{plan}: {name} gives other tokens"
                if number:
                    seconds[name].append(took)
        count = sum(map(len, wanted or []))
        entry = {
            name: {
                "tokens_per_second": round(count / statistics.median(took), 1),
                "in_place_is_faster": round(
                    statistics.median(
                        other / own for other, own in zip(took, seconds[IN_PLACE], strict=True)
                    ),
                    3,
                ),
            }
            for name, took in seconds.items()
        }
        report["plans"][plan] = entry
        print(plan, {name: value["in_place_is_faster"] for name, value in entry.items()})
    report |= {
        "command": shlex.join(["python", "examples/measure_onnx_cache.py", *sys.argv[1:]]),
        "machine": describe_machine(),
        "onnxruntime": onnxruntime.__version__,
        "batch_size": batch,
        "prompt_tokens": [len(ids) for ids in tokens],
        "max_tokens": max_tokens,
        "rounds": rounds,
    }
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
