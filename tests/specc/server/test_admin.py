"""What only the operator may ask: new weights of drafts, sleep and waking up, over HTTP."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from specc.errors import ConfigError
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.server.admin_options import Admin
from tests.reload_load import Address, LoadFigures, run_load
from tests.runtime.draft_pair import PARAMS, Pair, make_pair
from tests.specc.server.serving import Server, serve, wait_for

ADMIN = {"Authorization": "Bearer operator"}
USER = {"Authorization": "Bearer user"}
RELOAD = "/v1/drafts/reload"
BODY: dict[str, Any] = {"prompt": [5, 6, 7, 8], "temperature": 0, "max_tokens": 24}
BODY |= {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), "eager")


@pytest.fixture(scope="module")
def folder(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the server may open, and one beside it."""
    path = tmp_path_factory.mktemp("served") / "weights"
    path.mkdir()
    for file in (pair.right, pair.wrong):
        shutil.copy(file, path)
    shutil.copy(pair.right, path.parent / "beside.safetensors")
    (path / "link.safetensors").symlink_to("../beside.safetensors")
    (path / "text.safetensors").write_text("SECRET of the operator")
    return path


@pytest.fixture(scope="module")
def server(pair: Pair, folder: Path) -> Iterator[Server]:
    admin = Admin(("operator", "another"), folder)
    engine = Engine.load(pair.engine)
    with serve(engine, plan="chain-3", admin=admin, api_keys=("user",)) as running:
        yield running


def text_of(server: Server, **more: Any) -> str:
    answer = server.post("/v1/completions", BODY | more, headers=USER)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def reload(server: Server, path: Any, **more: Any) -> httpx.Response:
    return server.post(RELOAD, {"path": path, **more}, headers=ADMIN)


def figure(server: Server, name: str) -> float:
    (line,) = [x for x in server.get("/metrics").text.splitlines() if x.startswith(name)]
    return float(line.rpartition(" ")[2])


def test_new_weights(server: Server, folder: Path) -> None:
    expected = text_of(server)
    before = server.get("/version").json()["drafts"]["draft_0"]["version"]
    answer = reload(server, "right.safetensors")
    assert answer.status_code == 200, answer.text
    version = answer.json()["version"]
    assert answer.json() == {
        "draft": "draft_0",
        "version": before + 1,
        "sha256": server.get("/version").json()["drafts"]["draft_0"]["sha256"],
    }
    assert text_of(server) == expected
    assert reload(server, str(folder / "wrong.safetensors"), draft="draft_0").status_code == 200
    assert text_of(server) == expected
    label = '{draft="draft_0",model_name="tiny"}'
    assert figure(server, f"specc:draft_weights_version{label}") == version + 1
    assert figure(server, f"specc:draft_reloads_total{label}") == version + 1


@pytest.mark.parametrize("path", [RELOAD, "/sleep", "/wake_up"])
@pytest.mark.parametrize("headers", [{}, USER, {"Authorization": "Bearer"}, {"X-Key": "operator"}])
def test_nobody_else(server: Server, path: str, headers: dict[str, str]) -> None:
    answer = server.post(path, {"path": "right.safetensors"}, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_admin_key"
    assert server.get("/is_sleeping").json() == {"is_sleeping": False}


def test_the_admins_key_opens_nothing_else(server: Server) -> None:
    assert server.post("/v1/completions", BODY, headers=ADMIN).status_code == 401
    for path in ("/v1/drafts/reload/../completions", "/v1/drafts", "/v1/drafts/reload/more"):
        assert server.post(path, BODY, headers=ADMIN).status_code in (401, 404)


def test_without_an_admin_key(pair: Pair) -> None:
    with serve(Engine.load(pair.engine), plan="off") as running:
        for path in (RELOAD, "/sleep", "/wake_up"):
            for headers in ({}, ADMIN, {"Authorization": "Bearer"}):
                answer = running.post(path, {"path": "x"}, headers=headers)
                assert answer.status_code == 403
                assert answer.json()["error"]["code"] == "no_admin_key"
    with serve(Engine.load(pair.engine), plan="off", admin=Admin(("operator",))) as running:
        answer = reload(running, str(pair.right))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "no_draft_weights_dir")


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("../beside.safetensors", "outside"),
        ("link.safetensors", "outside"),
        ("/etc/passwd", "outside"),
        ("/proc/self/environ", "outside"),
        ("../../../../../../etc/shadow", "outside"),
        ("absent.safetensors", "No such file"),
        (".", "no plain file"),
        ("text.safetensors", "header"),
        ("", "names no file"),
        ("a\0b", "names no file"),
        ("a" * 5000, "names no file"),
        (7, "names no file"),
        (["right.safetensors"], "names no file"),
        (None, "names no file"),
    ],
)
def test_files_that_are_none(server: Server, path: Any, word: str) -> None:
    before = server.get("/version").json()
    answer = reload(server, path)
    assert answer.status_code == 400, answer.text
    assert word in answer.json()["error"]["message"]
    # of what is in a file nothing is told
    assert "SECRET" not in answer.text
    assert server.get("/version").json() == before
    assert text_of(server)


def test_bodies_that_are_none(server: Server) -> None:
    for body in ({"path": "right.safetensors", "force": True}, {"path": "x", "draft": 3}):
        assert server.post(RELOAD, body, headers=ADMIN).status_code == 400
    long = json.dumps({"path": "x" * (9 << 20)})
    headers = ADMIN | {"Content-Type": "application/json"}
    assert server.post(RELOAD, content=long, headers=headers).status_code == 413
    assert server.post(RELOAD, content="{", headers=headers).status_code == 400
    assert reload(server, "right.safetensors", draft="draft_7").status_code == 400


def test_sleep(server: Server) -> None:
    expected = text_of(server)
    assert server.get("/is_sleeping").json() == {"is_sleeping": False}
    assert figure(server, 'specc:engine_sleep_state{model_name="tiny",sleep_state="awake"}') == 1
    assert server.post("/sleep?level=1", headers=ADMIN).status_code == 200
    assert server.get("/is_sleeping").json() == {"is_sleeping": True}
    health = server.get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok", "is_sleeping": True})
    name = 'vllm:engine_sleep_state{model_name="tiny",sleep_state="weights_offloaded"}'
    assert figure(server, name) == 1
    answer = server.post("/v1/completions", BODY, headers=USER)
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) >= 1
    assert reload(server, "right.safetensors").status_code == 400
    assert server.post("/wake_up?tags=weights", headers=ADMIN).status_code == 400
    assert server.get("/is_sleeping").json() == {"is_sleeping": True}
    assert server.post("/wake_up", headers=ADMIN).status_code == 200
    assert text_of(server) == expected
    assert server.post("/wake_up?tags=weights&tags=kv_cache", headers=ADMIN).status_code == 200
    for level in ("2", "0", "-1", "x", "9" * 400):
        assert server.post(f"/sleep?level={level}", headers=ADMIN).status_code == 400
    assert server.get("/is_sleeping").json() == {"is_sleeping": False}


def test_options() -> None:
    with pytest.raises(ConfigError, match="admin key"):
        Admin(("operator", ""))
    with pytest.raises(ConfigError, match="draft-weights-dir"):
        Admin(("operator",), Path("/absent"))


def under_load(
    server: Server, pair: Pair, num_requests: int, every_s: float, sleeps: bool
) -> LoadFigures:
    """Requests of eight clients, each compared with its solo run; see `run_load`."""
    prompts = [[i % 200, 7, (3 * i) % 190] + [9] * (i % 11) for i in range(61)]
    with LLM(pair.engine, plan="off") as solo:
        texts = [output.outputs[0].text for output in solo.generate(prompts, PARAMS)]
    bodies = [BODY | {"prompt": prompt} for prompt in prompts]
    files = ["right.safetensors", "wrong.safetensors"]
    address = Address(server.base, "user", "operator")
    found = run_load(address, bodies, texts, files, num_requests, every_s, sleeps=sleeps)
    server.wait_until_idle()
    assert found.num_requests == num_requests
    return found


def test_requests_while_weights_change_and_it_sleeps(server: Server, pair: Pair) -> None:
    found = under_load(server, pair, 40, 0.05, sleeps=True)
    assert min(found.num_reloads, found.num_sleeps) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_two_thousand_requests(
    sleeps: bool, backend: str, pair: Pair, folder: Path, tmp_path: Path
) -> None:
    """A reload every second; every output is that of the request alone."""
    if backend == "cpu":
        pair, folder = make_pair(tmp_path, "cpu"), tmp_path
    engine = Engine.load(pair.engine)
    admin = Admin(("operator",), folder)
    with serve(engine, plan="chain-3", admin=admin, api_keys=("user",)) as running:
        found = under_load(running, pair, 2000, 1.0, sleeps)
    print(found.num_reloads, found.num_sleeps, found.num_refused, found.seconds)
    assert found.num_reloads >= 3


@pytest.mark.slow
def test_an_idle_server_wakes_by_itself(pair: Pair) -> None:
    engine = Engine.load(pair.engine)
    with serve(engine, plan="chain-3", api_keys=("user",), sleep_after_s=0.05) as running:
        expected = text_of(running)
        for _ in range(3):
            wait_for(lambda: running.service.operator.is_asleep, "it does not fall asleep")
            assert text_of(running) == expected
