"""The plugin's kernel against its oracle, its code for GPUs that are not here, its registration.

Nothing here runs the plugin: that takes full TensorRT. What registers it is a recorder that holds
functions to what TensorRT's own module asks of them.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from specc.errors import TensorRTError
from specc.kernels.cuda.experimental import qdp_attention as qdp
from specc.kernels.cuda.experimental.masked_attend import TILE_ROWS, masked_attend
from specc.kernels.reference.padded import masked_attention_reference
from specc.tensorrt import library as tensorrt

# no GPU has run it, and no default path uses it
pytestmark = pytest.mark.slow

# batch, heads, KV heads, nodes, rows, head size
SHAPES = [
    (1, 1, 1, 1, 16, 64),
    (2, 8, 2, 7, 80, 64),
    (3, 4, 4, 5, 37, 80),
    (1, 6, 2, 20, 130, 128),
    # nodes and heads of a group with a common divisor
    (2, 2, 1, 4, 50, 256),
]


def tensors(shape, dtype, device, seed=0):
    batch, heads, kv_heads, nodes, length, dim = shape
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(size, generator=generator).to(dtype)
        for size in ((batch, heads, nodes, dim), *[(batch, kv_heads, length, dim)] * 2)
    )
    mask = torch.rand(batch, 1, nodes, length, generator=generator) < 0.4
    mask[..., 0] = True
    # the last row is seen, as that of a full cache is
    mask[:, :, -1, -1] = True
    return tuple(x.to(device) for x in (q, k, v, mask))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_is_the_operator(shape, dtype, device):
    q, k, v, mask = tensors(shape, dtype, device)
    # rows that no node sees may hold anything
    dead = ~mask.any(dim=2)[:, 0]
    for cache in (k, v):
        cache.masked_fill_(dead[:, None, :, None], float("nan"))
    clean = [cache.nan_to_num(0.0).cpu() for cache in (k, v)]
    wanted = masked_attention_reference(q.cpu(), *clean, mask.cpu(), 0.21)
    tolerance = 2e-3 if dtype == torch.float16 else 1.6e-2
    for tile_rows in TILE_ROWS:
        found = masked_attend(q, k, v, mask, 0.21, tile_rows).cpu()
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("poisoned_memory")
def test_a_node_that_sees_nothing_gets_zeros(device):
    q, k, v, mask = tensors((2, 4, 2, 5, 80, 64), torch.float16, device)
    mask[1, 0, 3] = False
    # the first keys of a row are not its own: nothing seen in the first step
    mask[0, 0, 2, :70] = False
    wanted = masked_attention_reference(*(x.cpu() for x in (q, k, v, mask)), 0.125)
    found = masked_attend(q, k, v, mask, 0.125).cpu()
    assert not found[1, :, 3].any()
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)


def test_a_key_of_another_node_or_sequence_changes_nothing(device):
    q, k, v, mask = tensors((2, 4, 2, 6, 40, 64), torch.float16, device)
    mask[:] = False
    for node in range(6):
        mask[:, 0, node, 10 + node] = True
    out = masked_attend(q, k, v, mask, 0.125)
    # a node that sees one row gets that row's values
    for node in range(6):
        wanted = v[:, :, 10 + node].repeat_interleave(2, dim=1)
        torch.testing.assert_close(out[:, :, node], wanted)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda x: x.update(q=x["q"].float()), "one dtype"),
        (lambda x: x.update(v_cache=x["v_cache"][:, :, :-1]), "HK, L, D"),
        (lambda x: x.update(mask=x["mask"].long()), "needed bool"),
        (lambda x: x.update(mask=x["mask"][:, :, :-1]), "needed bool"),
        (lambda x: x.update(q=x["q"].transpose(1, 2).contiguous().transpose(1, 2)), "strides"),
        (lambda x: x.update({n: x[n][..., :48] for n in ("q", "k_cache", "v_cache")}), "D one of"),
    ],
)
def test_what_the_kernel_would_misread(change, word, device):
    given = dict(zip(qdp.INPUTS, tensors(SHAPES[1], torch.float16, device), strict=True))
    change(given)
    with pytest.raises(ValueError, match=word):
        masked_attend(**given, scale=1.0)


# code for GPUs

ENTRY = """.version 8.7
.visible .entry kernel(
\t.param .u64 .ptr .global .align 1 kernel_param_0,
\t.param .u32 kernel_param_1,
\t.param .u64 .ptr .global .align 1 kernel_param_2,
\t.param .u64 .ptr .global .align 1 kernel_param_3
)
.reqntid 128
{
\tld.param.b64 %rd1, [kernel_param_0];
}
"""


def test_parameters_that_nobody_passes_are_taken_out():
    found = qdp.strip_hidden_parameters(ENTRY, 2)
    assert found == ENTRY.replace(
        """kernel_param_1,
\t.param .u64 .ptr .global .align 1 kernel_param_2,
\t.param .u64 .ptr .global .align 1 kernel_param_3
""",
        "kernel_param_1\n",
    )
    # an older Triton adds none
    assert qdp.strip_hidden_parameters(ENTRY, 4) == ENTRY


@pytest.mark.parametrize(
    ("ptx", "count", "word"),
    [
        (ENTRY.replace("[kernel_param_0]", "[kernel_param_3]"), 2, "reads kernel_param_3"),
        (ENTRY, 1, "the parameter .param .u32"),
        (ENTRY, 5, "4 parameters"),
        (ENTRY + ENTRY, 2, "2 entries"),
        ("", 2, "0 entries"),
    ],
    ids=["another-parameter", "one-too-many", "some-too-few", "two-entries", "no-entry"],
)
def test_code_that_tensorrt_could_not_launch(ptx, count, word):
    with pytest.raises(TensorRTError) as error:
        qdp.strip_hidden_parameters(ptx, count)
    assert word in error.value.found


AHEAD = """
import json, re, subprocess, sys
from pathlib import Path
import torch, triton
from specc.errors import TensorRTError
from specc.kernels.cuda.experimental import qdp_attention as qdp

tools = Path(triton.__file__).parent / "backends/nvidia/bin"
found = []
for capability, arch, dtype, head_dim, rows in json.loads(sys.argv[1]):
    made = qdp.compile_plugin(getattr(torch, dtype), head_dim, 0.125, rows, capability)
    entry = made.ptx.partition(".entry")[2].partition(")")[0]
    file = Path(sys.argv[2]) / "kernel.ptx"
    file.write_text(made.ptx)
    tool = tools / ("ptxas" if capability < 100 else "ptxas-blackwell")
    done = subprocess.run(
        [str(tool), f"-arch={arch}", "-v", str(file), "-o", str(file) + ".cubin"],
        capture_output=True, text=True,
    )
    spilled = [int(x) for x in re.findall(r"(\\d+) bytes spill", done.stderr)]
    found.append({
        "rc": done.returncode, "said": done.stderr[-500:], "params": entry.count(".param"),
        "pointers": [".ptr" in line for line in entry.splitlines()[1:] if ".param" in line],
        "target": re.search(r"\\.target (\\w+)", made.ptx)[1], "shared": made.shared,
        "threads": made.num_threads, "spilled": spilled, "name": made.name,
        "bank": re.findall(r"(\\d+) bytes cmem\\[0\\]", done.stderr),
        "files": re.findall(r"[\\w/]+\\.py", made.ptx),
        "products": len(re.findall(r"mma\\.sync", made.ptx)),
    })
try:
    qdp.compile_plugin(torch.float32, 64, 1.0, 16, 90)
except TensorRTError as error:
    found.append(error.found)
print(json.dumps(found))
"""


def test_code_is_compiled_ahead_and_assembled(tmp_path):
    wanted = [
        (80, "sm_80", "float16", 64, 16),
        (90, "sm_90a", "bfloat16", 128, 32),
        (100, "sm_100a", "float16", 256, 32),
        (120, "sm_120a", "bfloat16", 80, 16),
    ]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-P", "-c", AHEAD, json.dumps(wanted), str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    *found, refused = json.loads(done.stdout)
    assert "torch.float32" in refused
    for (_, arch, *_), made in zip(wanted, found, strict=True):
        assert made["rc"] == 0, made["said"]
        assert made["target"] == arch
        assert made["name"] == "masked_attend_kernel"
        # what a plugin passes, in its order: inputs, numbers, output
        assert made["params"] == qdp.NUM_PARAMETERS == 9
        assert made["pointers"] == [True] * 4 + [False] * 4 + [True]
        assert made["threads"] == 128
        assert 0 < made["shared"] <= qdp.MAX_SHARED
        assert made["spilled"]
        assert not any(made["spilled"])
        assert made["products"] > 0
        assert made["files"] == [], "an engine names no file of the machine that built it"


# registration


class Expression:
    """A size of a tensor; `rest` keeps how it is computed."""

    def __init__(self, value, is_constant=False):
        self.value, self.is_constant = value, is_constant

    def constant_value(self):
        assert self.is_constant
        return self.value

    def __mul__(self, other):
        return Expression(self.value * getattr(other, "value", other))

    def __floordiv__(self, other):
        return Expression(self.value // getattr(other, "value", other))


class TensorDesc:
    def __init__(self, shape, dtype, static=()):
        self.shape_expr = [Expression(x, i in static) for i, x in enumerate(shape)]
        self.dtype = dtype

    def like(self):
        made = TensorDesc((), self.dtype)
        made.shape_expr = list(self.shape_expr)
        return made


class SymIntExprs(list):
    @classmethod
    def from_tuple(cls, items):
        return cls(items)


class Recorder(ModuleType):
    """Module `plugin` of TensorRT 11: what it asks of the functions that it is given."""

    TensorDesc, SymIntExprs = TensorDesc, SymIntExprs

    class SymInt32:
        def __init__(self, value):
            self.value = value.value

    class KernelLaunchParams:
        def __init__(self):
            self.grid_x = self.grid_y = self.grid_z = 1
            self.block_x = self.block_y = self.block_z = 1
            self.shared_mem = 0

    class AutoTuneCombination:
        def __init__(self, io_types, layouts, tactics):
            self.types = [x.strip() for x in io_types.split(",")]
            self.layouts, self.tactics = layouts, list(tactics)
            assert all(tactic > 0 for tactic in self.tactics)

    def __init__(self):
        super().__init__("fake_tensorrt.plugin")
        self.op = SimpleNamespace()
        self.known = {}

    @staticmethod
    def cdiv(a, b):
        return Expression(-(-a.value // b))

    def register(self, plugin_id):
        space, name = plugin_id.split("::")
        assert "." not in plugin_id
        assert space not in ("", "trt", "tensorrt", "std")

        def decorator(function):
            namespace = self.op.__dict__.setdefault(space, SimpleNamespace())
            assert not hasattr(namespace, name), "a plugin is registered once"
            signature = inspect.signature(function)
            saw = []
            for key, parameter in signature.parameters.items():
                assert parameter.default is inspect.Parameter.empty
                assert isinstance(parameter.annotation, type), "a class, not its name"
                saw.append(issubclass(parameter.annotation, TensorDesc))
                assert saw[-1] or parameter.annotation in (int, float, str, bool, bytes)
                assert key not in ("outputs", "stream", "tactic")
            assert saw == sorted(saw, reverse=True), "tensors come first"
            assert issubclass(signature.return_annotation, TensorDesc)
            self.known[plugin_id] = SimpleNamespace(
                describe=function,
                tensors=[
                    k for k, is_tensor in zip(signature.parameters, saw, strict=True) if is_tensor
                ],
                others=[
                    k
                    for k, is_tensor in zip(signature.parameters, saw, strict=True)
                    if not is_tensor
                ],
            )
            setattr(namespace, name, lambda *args, **kwargs: (plugin_id, args, kwargs))
            return function

        return decorator

    def autotune(self, plugin_id):
        def decorator(function):
            known = self.known[plugin_id]
            names = list(inspect.signature(function).parameters)
            mine = [name for name in known.others if name in names]
            assert names == [*known.tensors, *mine, "outputs"]
            known.autotune = function
            return function

        return decorator

    def aot_impl(self, plugin_id):
        def decorator(function):
            known = self.known[plugin_id]
            signature = inspect.signature(function)
            names = [*known.tensors, *known.others, "outputs", "tactic"]
            assert list(signature.parameters) == names
            name, code, launch, extra = signature.return_annotation.__args__
            assert {*name.__args__} == {*code.__args__} == {str, bytes}
            assert issubclass(launch, self.KernelLaunchParams)
            assert issubclass(extra, SymIntExprs)
            known.implement = function
            return function

        return decorator


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder()
    trt = ModuleType("fake_tensorrt")
    trt.DataType = SimpleNamespace(HALF="half", BF16="bf16", BOOL="bool", FLOAT="float")
    monkeypatch.setitem(sys.modules, "fake_tensorrt", trt)
    monkeypatch.setitem(sys.modules, "fake_tensorrt.plugin", made)
    monkeypatch.setattr(qdp.tensorrt, "load", lambda: trt)
    monkeypatch.setattr(qdp, "_registered", {})
    return made


def test_the_plugin_is_registered_once(recorder):
    assert qdp.register_plugin(90) is recorder
    assert qdp.register_plugin(90) is recorder
    known = recorder.known[qdp.PLUGIN]
    assert known.tensors == list(qdp.INPUTS)
    assert known.others == ["scale"]
    with pytest.raises(TensorRTError, match="sm_80, and registered for sm_90"):
        qdp.register_plugin(80)


def test_what_tensorrt_launches(recorder, monkeypatch):
    compiled = []

    def compile_plugin(*args):
        compiled.append(args)
        return qdp.PluginKernel("name", "code", 128, 1000 + args[3], args[3])

    monkeypatch.setattr(qdp, "compile_plugin", compile_plugin)
    qdp.register_plugin(90)
    known = recorder.known[qdp.PLUGIN]
    # batch 3, 8 heads on 2, 7 nodes, 80 rows
    q = TensorDesc((3, 8, 7, 128), "bf16", static=(1, 3))
    cache = TensorDesc((3, 2, 80, 128), "bf16", static=(1, 2, 3))
    mask = TensorDesc((3, 1, 7, 80), "bool")
    made = known.describe(q, cache, cache, mask, 0.3)
    assert made.dtype == "bf16"
    assert [x.value for x in made.shape_expr] == [3, 8, 7, 128]
    (choice,) = known.autotune(q, cache, cache, mask, [made])
    assert choice.types == ["FP16|BF16"] * 3 + ["BOOL", "FP16|BF16"]
    assert choice.layouts == "LINEAR"
    assert choice.tactics == [1, 2]
    for tactic, rows, tiles in ((1, 16, 2), (2, 32, 1)):
        name, code, launch, extra = known.implement(q, cache, cache, mask, 0.3, [made], tactic)
        assert (name, code) == ("name", "code")
        # 7 nodes × 4 heads of a group are packed; a block for each sequence and KV head
        assert (launch.grid_x.value, launch.grid_y.value, launch.grid_z) == (tiles, 6, 1)
        assert (launch.block_x, launch.shared_mem) == (128, 1000 + rows)
        # in the order of the kernel's arguments
        assert [x.value for x in extra] == [7, 80, 8, 2]
        assert compiled[-1] == (torch.bfloat16, 128, 0.3, rows, 90)
    names = [p for p in qdp.masked_attend_kernel.arg_names if not p.isupper()]
    assert names == [*qdp.INPUTS, *qdp.NUMBERS, "out"]
    loose = TensorDesc((3, 8, 7, 128), "bf16")
    with pytest.raises(TensorRTError, match="no fixed size"):
        known.implement(loose, cache, cache, mask, 0.3, [made], 1)
    wide = TensorDesc((3, 8, 7, 128), "float", static=(1, 3))
    with pytest.raises(TensorRTError, match="float with heads"):
        known.implement(wide, cache, cache, mask, 0.3, [made], 1)


def test_it_is_added_to_a_network_ahead_of_time(recorder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    added = []

    def add_plugin(plugin, aot=False):
        added.append((plugin, aot))
        return SimpleNamespace(get_output=lambda i: ("out", i))

    network = SimpleNamespace(add_plugin=add_plugin)
    assert qdp.add_attention(network, "q", "k", "v", "m", 2) == ("out", 0)
    assert added == [((qdp.PLUGIN, ("q", "k", "v", "m"), {"scale": 2.0}), True)]
    assert isinstance(added[0][0][2]["scale"], float)
    assert list(qdp._registered.values()) == [89]


def test_without_a_gpu_the_capability_is_asked_for(recorder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TensorRTError, match="no GPU that torch can use"):
        qdp.register_plugin()


def test_tensorrt_rtx_has_no_such_plugins(monkeypatch):
    monkeypatch.setenv(tensorrt.ENV, "tensorrt_rtx")
    with pytest.raises(TensorRTError, match="which has no plugins") as error:
        qdp.register_plugin(90)
    assert "full TensorRT" in error.value.needed
