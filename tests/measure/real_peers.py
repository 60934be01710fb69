r"""Tokens/s of a real model in specc, OpenVINO and onnxruntime-genai, a process each.

    python tests/measure/real_peers.py "$PYTHON specc engine/ suffix-chain-8" \
        "$OTHER openvino int4/" "$OTHER openvino int4/ lookup" "$OTHER onnxruntime int4-ort/"

Each argument is an interpreter (of an environment that has the program), the program, its model and
a plan. `specc bench --against` converts models itself, which its exporters cannot for sliding
windows; these come from each program's own converter.

    optimum-cli export openvino --model CHECKPOINT --task text-generation-with-past \
        --weight-format int4 --group-size 64 int4/
    python -m onnxruntime_genai.models.builder -m x -i CHECKPOINT -o int4-ort/ -p int4 -e cpu \
        --extra_options int4_block_size=32 int4_accuracy_level=4

A process reads each prompt once: a second round would find the histories and prefixes of the first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROMPTS = Path(__file__).resolve().parents[2] / "examples" / "real_prompts.jsonl"
TOKENS, THREADS = 96, 2


def specc(model: str, plan: str) -> Callable[[str], int]:
    """Output tokens of a prompt; so are those below."""
    from specc import LLM, SamplingParams

    llm = LLM(model, plan=plan or None, num_threads=THREADS)
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    return lambda prompt: len(llm.generate([prompt], params)[0].outputs[0].token_ids)


def openvino(model: str, plan: str) -> Callable[[str], int]:
    import openvino_genai

    is_lookup = plan == "lookup"
    options = {"prompt_lookup": True} if is_lookup else {}
    pipeline = openvino_genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=THREADS, **options)
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = TOKENS, True, False
    config.apply_chat_template = False
    if is_lookup:
        config.num_assistant_tokens, config.max_ngram_size = 8, 3
    return lambda prompt: pipeline.generate(
        [prompt], config
    ).perf_metrics.get_num_generated_tokens()


def onnxruntime(model: str, _: str) -> Callable[[str], int]:
    import onnxruntime_genai

    loaded = onnxruntime_genai.Model(onnxruntime_genai.Config(model))
    tokenizer = onnxruntime_genai.Tokenizer(loaded)

    def run(prompt: str) -> int:
        ids = tokenizer.encode(prompt)
        params = onnxruntime_genai.GeneratorParams(loaded)
        # its cache has to have the window's length at least
        params.set_search_options(do_sample=False, min_length=len(ids) + TOKENS, max_length=1024)
        generator = onnxruntime_genai.Generator(loaded, params)
        generator.append_tokens(ids)
        for _ in range(TOKENS):
            generator.generate_next_token()
        return TOKENS

    return run


def work(kind: str, model: str, plan: str = "") -> None:
    """Wait for a line, then run all prompts and print tokens/s."""
    run = {"specc": specc, "openvino": openvino, "onnxruntime": onnxruntime}[kind](model, plan)
    run("Warm up.")
    print("ready", flush=True)
    sys.stdin.readline()
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    start = time.perf_counter()
    tokens = sum(map(run, prompts))
    print(tokens / (time.perf_counter() - start), flush=True)


def main() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    for words in sys.argv[1:]:
        interpreter, *rest = words.split()
        command = [interpreter, "-P", __file__, "--work", *rest]
        found = subprocess.run(command, input="\n", capture_output=True, text=True, env=environment)
        lines = found.stdout.split()
        print(f"{' '.join(rest)}: {float(lines[-1]):.1f} tokens/s" if lines else found.stderr)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
    else:
        main()
