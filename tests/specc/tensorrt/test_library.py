"""Which TensorRT is used, what it can do, and what is said where it is absent or too old."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from specc.errors import TensorRTError
from specc.tensorrt import library as trt


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No test sees what another loaded."""
    monkeypatch.delenv(trt.ENV, raising=False)
    trt._load.cache_clear()
    yield
    trt._load.cache_clear()


def fake(name="tensorrt", version="11.0.0.1", **members):
    return SimpleNamespace(__name__=name, __version__=version, Builder=object, **members)


def test_rtx_is_found_and_described(monkeypatch):
    monkeypatch.setenv(trt.ENV, "tensorrt_rtx")
    facts = trt.facts()
    assert facts.name == "tensorrt_rtx"
    assert re.fullmatch(r"TensorRT-RTX 1\.\d+\.\d+\.\d+", facts.title)
    assert facts.builds_without_gpu
    assert not facts.has_timing_cache
    assert {"8.0", "8.6", "8.9", "12.0"} <= set(facts.compute_capabilities)
    assert "9.0" not in facts.compute_capabilities
    # listed by the module, but too old for fused attention
    assert "SM75" in trt.load().ComputeCapability.__members__
    assert "7.5" not in facts.compute_capabilities


def test_full_tensorrt_comes_first(monkeypatch):
    both = {"tensorrt": fake(), "tensorrt_rtx": fake("tensorrt_rtx", "1.7")}
    monkeypatch.setattr(trt.importlib, "import_module", both.__getitem__)
    facts = trt.facts()
    assert facts.name == "tensorrt"
    assert facts.title == "TensorRT 11.0.0.1"
    assert not facts.builds_without_gpu
    assert facts.has_timing_cache
    assert facts.compute_capabilities == ()


def test_the_variable_chooses(monkeypatch):
    both = {"tensorrt": fake(), "tensorrt_rtx": fake("tensorrt_rtx", "1.7")}
    monkeypatch.setattr(trt.importlib, "import_module", both.__getitem__)
    monkeypatch.setenv(trt.ENV, "tensorrt_rtx")
    assert trt.facts().name == "tensorrt_rtx"
    monkeypatch.setenv(trt.ENV, "tensorrt")
    assert trt.facts().name == "tensorrt"
    monkeypatch.setenv(trt.ENV, "torch")
    with pytest.raises(TensorRTError, match="SPECC_TENSORRT=torch"):
        trt.load()


@pytest.mark.parametrize("broken", [ImportError("libnvinfer.so.11: cannot open"), None])
def test_bindings_without_libraries_are_passed_over(monkeypatch, broken):
    """They fail when imported, or lack everything but a name."""

    def load(name):
        if name == "tensorrt":
            if broken:
                raise broken
            return SimpleNamespace(__name__=name, __version__="11.0")
        return fake("tensorrt_rtx", "1.7")

    monkeypatch.setattr(trt.importlib, "import_module", load)
    assert trt.facts().name == "tensorrt_rtx"
    monkeypatch.setenv(trt.ENV, "tensorrt")
    with pytest.raises(TensorRTError, match="tensorrt") as caught:
        trt.load()
    assert "tensorrt_rtx (" not in caught.value.found


def test_no_tensorrt_at_all(monkeypatch):
    def load(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(trt.importlib, "import_module", load)
    with pytest.raises(TensorRTError, match="no TensorRT that can be imported") as caught:
        trt.facts()
    assert "No module named 'tensorrt'" in caught.value.found
    assert "No module named 'tensorrt_rtx'" in caught.value.found
    assert "tensorrt-rtx" in caught.value.do


@pytest.mark.parametrize("text", ["8.9", "sm_89", "SM89", "sm89", " 8.9 "])
def test_ways_to_write_a_compute_capability(monkeypatch, text):
    monkeypatch.setenv(trt.ENV, "tensorrt_rtx")
    assert trt.parse_compute_capability(text) == "8.9"
    assert trt.parse_compute_capability("SM120") == "12.0"


@pytest.mark.parametrize("text", ["9.0", "sm_90", "10.0", "7.5"])
def test_gpus_that_rtx_does_not_build_for(monkeypatch, text):
    monkeypatch.setenv(trt.ENV, "tensorrt_rtx")
    with pytest.raises(TensorRTError, match="with TensorRT-RTX") as caught:
        trt.parse_compute_capability(text)
    for capability in trt.facts().compute_capabilities:
        assert capability in caught.value.needed
    assert "SPECC_TENSORRT=tensorrt" in caught.value.do


def test_gpus_without_fp8(monkeypatch):
    monkeypatch.setenv(trt.ENV, "tensorrt_rtx")
    for capability in (None, "8.9", "12.0"):
        trt.require_fp8(capability)
    for capability in ("8.0", "sm_86"):
        with pytest.raises(TensorRTError, match=r"fp8 for compute capability 8\.") as caught:
            trt.require_fp8(capability)
        assert "--quantize int8 or int4" in caught.value.do


@pytest.mark.parametrize("text", ["", "ada", "8", "8.9.1", "sm_8.9x"])
def test_what_is_no_compute_capability(monkeypatch, text):
    monkeypatch.setenv(trt.ENV, "tensorrt_rtx")
    with pytest.raises(TensorRTError, match=re.escape(repr(text))):
        trt.parse_compute_capability(text)


def test_full_tensorrt_builds_for_the_gpu_present(monkeypatch):
    monkeypatch.setattr(trt.importlib, "import_module", {"tensorrt": fake()}.__getitem__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TensorRTError, match="on a machine without a GPU") as caught:
        trt.parse_compute_capability("8.9")
    assert "SPECC_TENSORRT=tensorrt_rtx" in caught.value.do
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert trt.parse_compute_capability("9.0") == "9.0"
    with pytest.raises(TensorRTError, match=r"on a GPU of 9\.0"):
        trt.parse_compute_capability("8.9")


def test_operators_of_the_real_parser(monkeypatch):
    monkeypatch.setenv(trt.ENV, "tensorrt_rtx")
    module = trt.load()
    builder = module.Builder(trt.logger())
    parser = module.OnnxParser(builder.create_network(0), trt.logger())
    trt.require_operators(parser, set(trt.OPERATORS))
    with pytest.raises(TensorRTError, match="no operator StringNormalizer"):
        trt.require_operators(parser, {"Attention", "StringNormalizer"})


def test_a_version_too_old_for_an_operator(monkeypatch):
    monkeypatch.setenv(trt.ENV, "tensorrt_rtx")
    old = SimpleNamespace(supports_operator=lambda name: name == "Attention")
    with pytest.raises(TensorRTError) as caught:
        trt.require_operators(old, {"Attention", "TensorScatter"})
    assert caught.value.found.endswith("has no operator TensorScatter")
    assert caught.value.needed == "TensorRT 10.15 or newer, or TensorRT-RTX 1.4 or newer"
    with pytest.raises(TensorRTError) as caught:
        trt.require_operators(old, set(trt.OPERATORS))
    assert caught.value.needed == "TensorRT 11.0 or newer, or TensorRT-RTX 1.7 or newer"


def test_what_a_builder_says_goes_to_its_listener(monkeypatch):
    """TensorRT keeps the first logger of a process; builds one after another are told apart."""
    monkeypatch.setenv(trt.ENV, "tensorrt_rtx")
    module = trt.load()

    def fail() -> None:
        network = module.Builder(trt.logger()).create_network(0)
        module.OnnxParser(network, trt.logger()).parse(b"no model")

    heard: list[list[str]] = []
    for _ in range(2):
        lines: list[str] = []
        with trt.listening(lambda severity, text, into=lines: into.append(severity)):
            fail()
        heard.append(lines)
    assert all("ERROR" in lines for lines in heard)
    before = [len(lines) for lines in heard]
    fail()
    assert [len(lines) for lines in heard] == before


def test_listeners_wait_for_each_other(monkeypatch):
    monkeypatch.setenv(trt.ENV, "tensorrt_rtx")
    log = trt._log("tensorrt_rtx")
    entered = threading.Event()

    def second():
        with trt.listening(lambda *line: None):
            entered.set()

    def first_line(*line):
        pass

    with trt.listening(first_line):
        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.2)
        assert log.sink is first_line
    thread.join(5)
    assert entered.is_set()
    assert log.sink is None


@pytest.mark.slow
def test_nothing_loads_tensorrt_before_it_is_asked_for():
    code = (
        "import sys; import specc.tensorrt.library, specc.tensorrt.layers;"
        "import specc.passes.lower.tensorrt.lower;"
        "print([m for m in ('tensorrt', 'tensorrt_rtx', 'onnx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
