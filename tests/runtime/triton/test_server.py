"""specc's model in a real Triton Inference Server, whose Python has neither transformers nor typer.

One server for the whole file: the model `specc` is laid out with a model.py, `short` is a
config.pbtxt of two lines and an engine, served by the backend `specc`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specc.config import CompileConfig
from specc.speculation.plans import SpecPlan
from tests import command_line, engines
from tests.runtime.ranks.processes import children_of, is_gone, wait_gone
from tests.runtime.triton.environment import backends as server_backends
from tests.runtime.triton.environment import environment, unsupported
from tests.runtime.triton.grpc_client import GrpcClient
from tests.runtime.triton.server import ROOT, TritonServer

# a server takes a quarter of a minute to start; what it calls is tested in test_model.py
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(unsupported() is not None, reason=str(unsupported())),
]

# positions of the models: room for requests that are still running when they are cancelled
POSITIONS = 4096
LONG = 4000
PROMPTS = ["def f(x):", "a", "The quick brown fox jumps over the lazy dog."]
# what no client may see of a server
SECRETS = ("Traceback", 'File "', "/specc", "/runtime/", ".py")


@pytest.fixture(scope="module")
def engine(tmp_path_factory, save_llama) -> Path:
    """A random model; the draft is the same with noise on its weights, so it is right at times."""
    root = tmp_path_factory.mktemp("triton-engine")
    for name in ("target", "draft"):
        save_llama(root / name, 1, 1, max_position_embeddings=POSITIONS)
    weights = load_file(root / "draft" / "model.safetensors")
    noisy = {name: w + 0.05 * torch.randn(w.shape) * w.std() for name, w in weights.items()}
    save_file(noisy, root / "draft" / "model.safetensors", {"format": "pt"})
    plans = (SpecPlan.from_widths((2, 1)), SpecPlan.from_widths((1, 1, 1)))
    config = CompileConfig(plans=plans, max_seq_len=POSITIONS, max_batch_size=8)
    return engines.build(root / "target", root / "draft", root / "engine", config)


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory) -> Iterator[TritonServer]:
    if not (ROOT / ".installed").exists():
        pytest.fail("no Triton Inference Server: run make build/triton-server/.installed")
    root = tmp_path_factory.mktemp("triton-server")
    models, backends = root / "models", root / "backends"
    invoke("triton", engine, "-o", models, "--backend", "eager", "--threads", 1)
    options = ("--name", "short", "--layout", "backend", "--reference")
    invoke("triton", engine, "-o", models, *options)
    (models / "short" / "config.pbtxt").write_text(
        f'backend: "specc"\nparameters {{ key: "engine" value {{ string_value: "{engine}" }} }}\n'
    )
    (backends / "python").symlink_to(server_backends(ROOT) / "python")
    running = TritonServer(models, backends, root, ("specc", "short"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def client(server) -> Iterator[GrpcClient]:
    grpc = GrpcClient(server)
    yield grpc
    grpc.close()


@pytest.fixture(scope="module")
def wanted(engine, tmp_path_factory) -> dict[tuple[str, int | None], Wanted]:
    """What `specc run` prints for each prompt, greedily and with a seed."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    found = {}
    for seed, options in (
        (None, ("--temperature", 0)),
        (7, ("--temperature", "0.8", "--seed", "7")),
    ):
        common = ("--max-tokens", 40, "--ignore-eos", "--json")
        printed = json.loads(invoke("run", engine, "--prompts", file, *common, *options))
        for prompt, output in zip(PROMPTS, printed["outputs"], strict=True):
            found[prompt, seed] = Wanted(output["token_ids"], output["text"])
    return found


@dataclass(frozen=True)
class Wanted:
    token_ids: list[int]
    text: str


def invoke(*arguments: Any) -> str:
    result = command_line.invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def sampling(seed: int | None) -> dict[str, Any]:
    return {"temperature": 0} if seed is None else {"temperature": 0.8, "seed": seed}


def is_idle(server: TritonServer, model: str = "specc") -> bool:
    metrics = server.metrics(model)
    return not metrics["kv_cache_blocks_used"] and not metrics["num_requests_running"]


def test_the_environment_has_neither_transformers_nor_the_command_line():
    code = (
        "import importlib.util as u, numpy; print([n for n in ('transformers', 'huggingface_hub',"
        "'typer', 'rich', 'fastapi', 'onnx') if u.find_spec(n)], numpy.__version__)"
    )
    python = str(ROOT / "venv" / "bin" / "python3")
    done = subprocess.run(
        [python, "-P", "-c", code], env=environment(ROOT), capture_output=True, text=True
    )
    assert done.stdout.startswith("[] 1."), done.stdout + done.stderr


@pytest.mark.default("specc-None")
@pytest.mark.parametrize(
    ("model", "seed"),
    [("specc", None), pytest.param("specc", 7, marks=pytest.mark.slow), ("short", 7)],
)
def test_generate_equals_specc_run(server, wanted, model, seed):
    for prompt in PROMPTS:
        body = {"text_input": prompt, "max_tokens": 40, "ignore_eos": True}
        status, got = server.generate(model, **body, **sampling(seed), return_output_ids=True)
        assert status == 200, got
        assert got["output_ids"] == wanted[prompt, seed].token_ids
        assert got["text_output"] == wanted[prompt, seed].text
        assert got["finish_reason"] == "length"


def test_generate_stream_has_the_same_text_in_pieces(server, wanted):
    body = {"text_input": PROMPTS[0], "max_tokens": 40, "ignore_eos": True, "stream": True}
    body |= sampling(None)
    events = list(server.generate_stream(**body, exclude_input_in_output=False))
    assert "".join(e["text_output"] for e in events) == PROMPTS[0] + wanted[PROMPTS[0], None].text
    assert len(events) > 5
    assert [e.get("finish_reason") for e in events] == [None] * (len(events) - 1) + ["length"]


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [False, True])
def test_grpc_equals_specc_run(client, wanted, is_streamed):
    for (prompt, seed), want in wanted.items():
        stream = client.ask(
            text_input=prompt,
            stream=is_streamed,
            max_tokens=40,
            ignore_eos=True,
            return_output_ids=True,
            return_num_output_tokens=True,
            **sampling(seed),
        )
        assert stream.error is None
        assert (len(stream.responses) == 1) == (not is_streamed)
        assert stream.token_ids == want.token_ids
        assert stream.text == want.text
        assert sum(r["num_output_tokens"] for r in stream.responses) == 40


def test_token_ids_may_come_instead_of_text(client, server, wanted):
    ids = list(PROMPTS[0].encode())
    _, told = server.generate(
        text_input=PROMPTS[0], max_tokens=1, return_num_input_tokens=True, return_output_ids=True
    )
    assert told["num_input_tokens"] == len(ids)  # a tokenizer of bytes
    stream = client.ask(input_ids=ids, max_tokens=1, outputs=("output_ids",))
    # the tokenizer numbers bytes in its own order: other ids, so another prompt of that length
    assert set(stream.responses[0]) == {"output_ids"}
    assert len(stream.token_ids) == 1


def test_the_openai_front_end_s_inputs_are_taken(client):
    """Names, types and shapes that NVIDIA's front end sends to other backends than vLLM's."""
    asked = {
        "text_input": "x = ", "stream": False, "max_tokens": 24, "stop_words": ["z", "q"],
        "top_p": 0.9, "frequency_penalty": 0.1, "presence_penalty": 0.1, "seed": 3,
        "temperature": 1.0, "exclude_input_in_output": True, "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }  # fmt: skip
    (response,) = client.ask(**asked).responses
    assert response["num_input_tokens"] == 4
    assert 0 < response["num_output_tokens"] <= 24
    assert not {*"zq"} & {*response["text_output"].decode()}
    guided = {"guided_decoding_guide_type": "json_schema"}
    guided["guided_decoding_guide"] = '{"enum": ["left", "right"]}'
    (response,) = client.ask(text_input="x", max_tokens=24, **guided).responses
    assert json.loads(response["text_output"]) in ("left", "right")


@pytest.mark.slow
def test_32_streams_at_once(server, client, wanted):
    """Half by gRPC, half by HTTP: more than run together, so some wait."""
    barrier = threading.Barrier(32)
    keys = [(PROMPTS[i % 3], (None, 7)[i % 2]) for i in range(32)]

    def ask(i: int) -> str:
        prompt, seed = keys[i]
        asked = {"text_input": prompt, "stream": True, "max_tokens": 40, "ignore_eos": True}
        barrier.wait(30)
        if i < 16:
            return client.ask(**asked, **sampling(seed)).text
        return "".join(e["text_output"] for e in server.generate_stream(**asked, **sampling(seed)))

    with ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(ask, range(32)))
    assert texts == [wanted[key].text for key in keys]
    assert server.wait_for(lambda: is_idle(server))


def test_a_cancelled_grpc_stream_frees_its_blocks(server, client):
    stream, arrived = client.start(text_input="a", stream=True, max_tokens=LONG, ignore_eos=True)
    assert_cancelled(server, arrived.get, lambda: stream.stop_stream(cancel_requests=True))


def test_an_http_client_that_leaves_frees_its_blocks(server):
    body = {"text_input": "a", "stream": True, "max_tokens": LONG, "ignore_eos": True}
    connection = post_by_hand(server, "generate_stream", body)
    assert_cancelled(server, lambda timeout: connection.recv(100), connection.close)


def assert_cancelled(server, first_response, leave):
    before = server.metrics()["generation_tokens_total"]
    first_response(timeout=20)
    assert server.wait_for(lambda: server.metrics()["kv_cache_blocks_used"] > 0)
    leave()
    assert server.wait_for(lambda: is_idle(server))
    # it had not simply come to its end
    assert server.metrics()["generation_tokens_total"] - before < LONG


def post_by_hand(server, path: str, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.http), timeout=20)
    head = (
        f"POST /v2/models/specc/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"text_input": "a", "max_tokens": 0}, "max_tokens=0"),
        ({"text_input": "a", "temperature": -1.0}, "temperature=-1.0"),
        ({"text_input": ""}, "no tokens"),
        ({"max_tokens": 4}, "neither text_input nor input_ids"),
        ({"text_input": "a" * (POSITIONS + 1)}, f"at most {POSITIONS - 1}"),
        ({"text_input": "a", "timeout": -1.0}, "timeout -1"),
        ({"text_input": "a", "rule": "none"}, "rule='none'"),
        ({"text_input": "a", "input_ids": [1, 2]}, "text_input and input_ids"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_requests_are_told_what_is_wrong(server, client, asked, says):
    status, got = server.generate(**asked)
    assert status == 400
    stream = client.ask(**asked)
    assert stream.error is not None
    for message in (got["error"], stream.error.message()):
        assert says in message
        assert "needed: " in message
        assert not [secret for secret in SECRETS if secret in message]


def test_what_triton_itself_refuses(server, client):
    assert server.post("models/specc/generate", b"{no json")[0] >= 400
    assert server.post("models/none/generate", {"text_input": "a"})[0] == 404
    assert client.ask(text_input=b"\xff\xfe").error.message().startswith("found:  text_input holds")
    status, got = server.generate(text_input="a", temprature=0.5)
    assert status == 400
    assert "'temprature'" in got["error"]
    # the model is as it was
    assert server.generate(text_input="a", parameters={"max_tokens": 2})[0] == 200


def settled(server: TritonServer) -> dict[str, float]:
    """Metrics that do not change any more: they are a twentieth of a second late."""
    last = server.metrics()
    while True:
        time.sleep(0.15)
        if (now := server.metrics()) == last:
            return now
        last = now


def test_metrics_add_up(server, client):
    before = settled(server)
    asked = {"max_tokens": 30, "ignore_eos": True, "return_perf_metrics": True}
    responses = [client.ask(text_input=p, **asked).responses[-1] for p in PROMPTS]
    plain = client.ask(text_input="a", speculative=False, **asked).responses[-1]
    names = ("total_draft_tokens", "total_accepted_draft_tokens")
    drafted, accepted = (sum(r[name] for r in responses) for name in names)
    assert drafted > accepted > 0
    assert plain["total_draft_tokens"] == 0
    after = settled(server)
    more = {name: after[name] - before.get(name, 0) for name in after}
    assert more["request_success_total"] == 4
    assert more["generation_tokens_total"] == 4 * 30
    assert more["spec_decode_num_draft_tokens_total"] == drafted
    assert more["spec_decode_num_accepted_tokens_total"] == accepted
    per_position = [v for n, v in more.items() if n.startswith("spec_decode_num_accepted_tokens_p")]
    assert sum(per_position) == accepted
    assert after["healthy"] == 1
    for response in responses:
        times = [response[f"{n}_time_ns"] for n in ("arrival", "first_token", "last_token")]
        assert times == sorted(times)
        assert 0 <= time.time_ns() - times[0] < 60e9
        rate = response["total_accepted_draft_tokens"] / response["total_draft_tokens"]
        assert response["acceptance_rate"] == pytest.approx(rate)


@pytest.mark.slow
def test_a_model_whose_process_died_comes_back_by_loading_it_again(server, wanted):
    """Triton calls such a model ready for ever: only requests and metrics tell."""
    asked = {"text_input": PROMPTS[0], "max_tokens": 40, "ignore_eos": True, **sampling(None)}
    pids = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in server.stubs()}
    (stub,) = [pid for pid, command in pids.items() if "short" in command]
    os.kill(stub, signal.SIGKILL)
    status, got = server.generate("short", **asked)
    assert status >= 400
    assert "not healthy" in got["error"]
    assert server.is_ready("short")
    assert server.post("repository/models/short/unload")[0] == 200
    assert server.generate("short", **asked)[0] == 404
    assert not server.is_ready("short")
    assert server.post("repository/models/short/load")[0] == 200
    status, got = server.generate("short", **asked)
    assert status == 200, got
    assert got["text_output"] == wanted[PROMPTS[0], None].text
    # the other model has noticed nothing
    assert server.generate(**asked)[1]["text_output"] == wanted[PROMPTS[0], None].text


@pytest.mark.slow
def test_a_sharded_engine_and_the_end_of_the_server(server, wanted, tmp_path_factory):
    """Last of all, as it ends the server: the ranks are processes of the model's process."""
    cut = engines.build_cut(tmp_path_factory.mktemp("cut"), positions=POSITIONS)
    options = ("--name", "ranks", "--reference", "--oversubscribe", "--rank-timeout", "5")
    invoke("triton", cut, "-o", server.repository, *options)
    asked = {"text_input": PROMPTS[0], "max_tokens": 40, "ignore_eos": True, **sampling(None)}
    before = set(server.stubs())

    def stubs() -> set[int]:
        # the server keeps the exit code of one that died
        return {pid for pid in server.stubs() if not is_gone(pid)}

    def load() -> list[int]:
        """Processes of the model: its own, and that of rank 1."""
        status, got = server.post("repository/models/ranks/load")
        assert status == 200, got
        (stub,) = stubs() - before
        pids = [stub, *children_of(stub)]
        assert len(pids) == 2
        status, got = server.generate("ranks", **asked)
        assert status == 200, got
        assert got["text_output"] == wanted[PROMPTS[0], None].text
        return pids

    pids = load()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(server.generate, "ranks", **asked | {"max_tokens": LONG})
        assert server.wait_for(lambda: server.metrics("ranks")["num_requests_running"] == 1)
        os.kill(pids[1], signal.SIGKILL)
        status, got = answer.result(10)
    assert status >= 400
    assert "the engine failed" in got["error"]
    assert not wait_gone(pids, 10)
    assert f"rank 1 (pid {pids[1]}) was killed by signal 9" in server.log
    status, got = server.generate("ranks", **asked)
    assert "not healthy" in got["error"]
    # the other models have noticed nothing
    assert server.generate(**asked)[1]["text_output"] == wanted[PROMPTS[0], None].text
    assert server.post("repository/models/ranks/unload")[0] == 200
    pids = [*load(), *before]
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(20)
    assert not wait_gone(pids, 10)
