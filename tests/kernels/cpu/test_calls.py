"""The C interface of operators, kernels/cpu/specc.h: what a program could pass, right or wrong."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.kernels import native, native_calls
from specc.kernels.native_calls import INT, INTS, NONE, OF_TENSOR, TENSOR, TENSORS, TEXT, VALUE

HEADER = native.SOURCE_DIR / "specc.h"
MOST = 2**63 - 1

pytestmark = pytest.mark.usefixtures("native_operators")


def described(x: Tensor, **changes: Any) -> bytes:
    """A SpeccTensor of a tensor, but for what is changed."""
    whole = {
        "data": x.data_ptr(),
        "dtype": native_calls.CODES[x.dtype],
        "dim": x.dim(),
        "sizes": [*x.shape],
        "strides": [*x.stride()],
        "bytes": x.untyped_storage().nbytes() - x.storage_offset() * x.itemsize,
    } | changes
    sizes, strides = ([*whole[k], *[0] * 8][:8] for k in ("sizes", "strides"))
    return TENSOR.pack(
        whole["data"], whole["dtype"], whole["dim"], *sizes, *strides, whole["bytes"]
    )


class Calling:
    """One call of the C function, with whatever values it is given."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def value(self, kind: int, integer: int = 0, items: bytes | None = None) -> bytes:
        address = 0
        if items is not None:
            self.kept.append(ctypes.create_string_buffer(items, len(items)))
            address = ctypes.addressof(self.kept[-1])
        return VALUE.pack(kind, integer, 0.0, address)

    def tensor(self, x: Tensor, **changes: Any) -> bytes:
        self.kept.append(x)
        return self.value(OF_TENSOR, 0, described(x, **changes))

    def __call__(self, name: str, *values: bytes, count: int | None = None) -> list[Tensor]:
        """Results, copied out of memory of the library's own."""
        library = native.c_functions()
        library.specc_free.argtypes = (ctypes.c_void_p,)
        results = ctypes.create_string_buffer(4 * TENSOR.size)
        num_results = ctypes.c_int64()
        given = ctypes.create_string_buffer(b"".join(values), 32 * len(values) + 1)
        no_allocator = ctypes.cast(None, native_calls._ALLOCATE)
        code = library.specc_call(
            name.encode(), ctypes.addressof(given), len(values) if count is None else count,
            results, ctypes.byref(num_results), no_allocator, None,
        )  # fmt: skip
        native_calls.check(code)
        found = []
        for i in range(num_results.value):
            data, dtype, dim, *rest = TENSOR.unpack_from(results, i * TENSOR.size)
            assert data % 64 == 0
            size = rest[-1]
            content = bytearray(ctypes.string_at(data, size))
            flat = torch.frombuffer(content, dtype=native_calls.DTYPES[dtype]) if size else None
            found.append(
                torch.zeros(0) if flat is None else flat.as_strided(rest[:dim], rest[8:16][:dim])
            )
            library.specc_free(data)
        return found


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_memory_of_the_library() -> None:
    call = Calling()
    slot, position = call(
        "specc::tree_rows", *(call.tensor(x) for x in (int32(5, 7), int32(0, 1), int32(0, 2)))
    )
    assert slot.tolist() == [5, 6, 7, 8]
    assert position.tolist() == [5, 7, 7, 9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bytes": 15}, "a tensor ends where its memory does"),
        ({"bytes": 0}, "a tensor ends where its memory does"),
        ({"bytes": -1}, "a tensor ends where its memory does"),
        ({"sizes": [5]}, "a tensor ends where its memory does"),
        ({"strides": [2]}, "a tensor ends where its memory does"),
        ({"data": 0}, "a tensor with elements has memory"),
        ({"dim": 9}, "0 … 8 dimensions"),
        ({"dim": -1}, "0 … 8 dimensions"),
        ({"sizes": [-1]}, "sizes and strides of a tensor are 0 or more"),
        ({"strides": [-1]}, "sizes and strides of a tensor are 0 or more"),
        ({"sizes": [MOST]}, "a tensor has no such size"),
        ({"strides": [MOST]}, "a tensor has no such size"),
        ({"dim": 2, "sizes": [2**40, 2**40], "strides": [0, 0]}, "a tensor has no such size"),
        ({"dim": 2, "sizes": [2, 2], "strides": [MOST, 1]}, "a tensor has no such size"),
        ({"dtype": 10}, "a tensor of dtype 10"),
        ({"dtype": -1}, "a tensor of dtype -1"),
    ],
)
def test_a_tensor_that_leaves_its_memory(changes: dict[str, Any], message: str) -> None:
    call = Calling()
    nodes, lengths = int32(0, 1, 2, 3), int32(5)
    with pytest.raises(RuntimeError, match=message):
        call(
            "specc::tree_rows",
            call.tensor(lengths), call.tensor(nodes, **changes), call.tensor(nodes),
        )  # fmt: skip
    # in a list, too
    good, none = call.tensor(nodes), call.value(NONE)
    several = described(nodes) + described(nodes, **changes)
    with pytest.raises(RuntimeError, match=message):
        call(
            "specc::accept", good, good, good, call.value(INT, 3), none, none,
            call.value(TENSORS, 2, several), good, good, good, good, good,
        )  # fmt: skip


@pytest.mark.parametrize("sizes", [(0, MOST), (MOST, 0), (MOST, MOST, 0)])
def test_a_tensor_without_elements_may_lie_nowhere(sizes: tuple[int, ...]) -> None:
    """However large its other sizes are; here it is refused for its dimensions, or is one row."""
    call = Calling()
    x = torch.zeros(0, dtype=torch.int32)
    changes = {"dim": len(sizes), "sizes": sizes, "strides": [0] * len(sizes), "data": 0}
    with pytest.raises(RuntimeError, match="nodes is"):
        call("specc::tree_rows", call.tensor(x), call.tensor(x, **changes), call.tensor(x))
    assert len(call("specc::tree_rows", *[call.tensor(x)] * 3)) == 2


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("specc::nothing", (), "there is no operator specc::nothing"),
        ("", (), "there is no operator"),
        ("specc::ancestor_words", (), "another number of arguments"),
        ("specc::ancestor_words", ((NONE,),), "an argument is a tensor"),
        ("specc::ancestor_words", ((OF_TENSOR,),), "an argument is a tensor"),
        ("specc::ancestor_words", ((INT, 3),), "an argument is a tensor"),
        ("specc::ancestor_words", ((TEXT, 1),), "a list has 0 items or more"),
        ("specc::ancestor_words", ((INTS, -1, b"12345678"),), "a list has 0 items or more"),
        ("specc::ancestor_words", ((TENSORS, MOST),), "a list has 0 items or more"),
        ("specc::ancestor_words", ((9,),), "of a kind that is known"),
        ("specc::ancestor_words", ((-1,),), "of a kind that is known"),
        ("specc::ancestor_words", ((2**32 + 1,),), "of a kind that is known"),
    ],
)
def test_calls_of_nothing(name: str, values: tuple[Any, ...], message: str) -> None:
    call = Calling()
    with pytest.raises(RuntimeError, match=f"specc: .*{message}"):
        call(name, *(call.value(*value) for value in values))


@pytest.mark.parametrize("count", [-1, 65, MOST])
def test_numbers_of_arguments(count: int) -> None:
    with pytest.raises(RuntimeError, match="0 … 64 arguments"):
        Calling()("specc::ancestor_words", count=count)


def test_what_is_written_is_no_index() -> None:
    """Views of one memory: a table that a write would change after it was found to be good."""
    memory = torch.zeros(64)
    slab, table = memory.view(2, 4, 8), memory.view(torch.int32)[8:9].view(1, 1)
    for name, arguments in {
        "write_rows": (torch.zeros(1, 8), slab, int32(0, 1), int32(0), table),
        "commit_kv": (
            memory.view(1, 2, 2, 2, 1, 8), int32(0).view(1, 1), int32(1).view(1, 1), table
        ),
        "record_tokens": (
            memory.view(torch.int32).view(8, 8), table, int32(0), torch.zeros(1, 1).long(),
            torch.zeros(1, 1).long(), int32(0),
        ),
        "tree_attention": (
            *[torch.zeros(1, 1, 8)] * 3, memory.view(2, 4, 1, 8), torch.zeros(2, 4, 1, 8),
            int32(0, 1), torch.zeros(1).long(), int32(0), int32(0), None, table,
            None, None, 1.0, 0, 0, 0.0, False, 0, 0,
        ),
        "block_mass": (
            torch.zeros(1, 1, 8), torch.zeros(2, 4, 1, 8), int32(0, 1), torch.zeros(1).long(),
            int32(0), int32(0), None, table, memory.view(1, 64), 1.0,
        ),
    }.items():  # fmt: skip
        with pytest.raises(RuntimeError, match="what is written does not overlap indices"):
            native.call(f"specc::{name}", *arguments)
        apart = [table.clone() if x is table else x for x in arguments]
        native.call(f"specc::{name}", *apart)


@pytest.mark.skipif("ASAN_OPTIONS" in os.environ, reason="AddressSanitizer reports it")
def test_no_memory_for_a_result() -> None:
    """One row many times over is a good argument; no machine has room for what is made of it."""
    logits = torch.randn(1, 2).expand(2**45, 2)
    with pytest.raises(RuntimeError, match="specc: no memory for a result of 562949953421312 b"):
        native.call("specc::tree_expand", logits, 1 + 1)
    call = Calling()
    with pytest.raises(RuntimeError, match="specc: no memory for a result of 562949953421312 b"):
        call("specc::tree_expand", call.tensor(logits), call.value(INT, 2))


def test_an_error_is_of_its_thread() -> None:
    def fail(name: str) -> str:
        with pytest.raises(RuntimeError) as caught:
            native.call(name)
        return str(caught.value)

    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(fail("specc::other")))
    assert "specc::one" in fail("specc::one")
    thread.start()
    thread.join()
    assert "specc::other" in found[0]
    assert b"specc::one" in native_calls._error()


def test_threads_of_kernels() -> None:
    before = native.kernel_threads()
    native.set_kernel_threads(3)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(native.kernel_threads()))
    thread.start()
    thread.join()
    assert native.kernel_threads() == 3
    # of the thread that has set it alone
    assert found != [3]
    with pytest.raises(RuntimeError, match="0 threads or more, not -1"):
        native.set_kernel_threads(-1)
    native.set_kernel_threads(0)
    assert native.kernel_threads() == before == torch.get_num_threads()


def test_views_and_long_lists_of_a_call() -> None:
    """More arguments than a thread's buffer has room for, and tensors that lie anywhere."""
    tokens = torch.randint(0, 5, (2, 9))
    big = torch.zeros(200, 2, 3, 4)[::2, 1:, ::2]
    with pytest.raises(RuntimeError, match="draft_logits are"):
        native.call(
            "specc::accept", torch.zeros(18, 5), tokens, torch.zeros(2, 9, dtype=torch.int32), 3,
            None, None, [big] * 100, torch.zeros(2, 6), torch.zeros(2, 4).long(), int32(0, 0),
            torch.zeros(1, 8, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32),
        )  # fmt: skip
    parents = torch.tensor([[-1, 0, 0], [-1, 0, 1]], dtype=torch.int32)
    wide = torch.stack((parents, parents), 1).view(4, 3)[::2]
    for ours, theirs in zip(
        native.call("specc::ancestor_words", wide),
        torch.ops.specc.ancestor_words(wide),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_what_is_no_argument() -> None:
    x = torch.zeros(2, 2)
    for value in (2**63, -(2**63) - 1, [2**63]):
        with pytest.raises(RuntimeError, match="a number that is no int64"):
            native.call("specc::tree_expand", x, value)
    for value in (object(), [x, 3], {}):
        with pytest.raises(TypeError, match=r"takes no|has no"):
            native.call("specc::tree_expand", value, 1)
    with pytest.raises(RuntimeError, match="an argument is a tensor"):
        native.call("specc::tree_expand", [x, None], 1)
    with pytest.raises(RuntimeError, match="a tensor of 9 dimensions"):
        native.call("specc::tree_expand", x.view(2, 2, *[1] * 7), 1)
    with pytest.raises(RuntimeError, match="a tensor on meta"):
        native.call("specc::tree_expand", x.to("meta"), 1)


def test_results_own_their_memory() -> None:
    made = [native.call("specc::tree_expand", torch.eye(5), 2) for _ in range(50)]
    assert len({x.data_ptr() for x in made}) == 50
    assert all(torch.equal(x, made[0]) for x in made)


def test_the_header_is_c_and_says_what_python_knows() -> None:
    text = HEADER.read_text(encoding="utf-8")
    numbers = {name: int(x) for name, x in re.findall(r"(SPECC_\w+) = (\d+)", text)}
    assert numbers["SPECC_VALUE_TENSORS"] == TENSORS == 8
    assert numbers["SPECC_VALUE_NONE"] == NONE == 0
    for code, dtype in native_calls.DTYPES.items():
        assert numbers[f"SPECC_{str(dtype).removeprefix('torch.').upper()}"] == code
    version = re.search(r"#define SPECC_INTERFACE_VERSION (\d+)", text)
    assert version is not None
    assert int(version[1]) == native.INTERFACE_VERSION
    size = "struct { char a[sizeof(SpeccTensor) == %d && sizeof(SpeccValue) == %d ? 1 : -1]; } x;"
    program = f"{text}\n{size % (TENSOR.size, VALUE.size)}"
    command = ["cc", "-std=c99", "-Wall", "-Werror", "-pedantic", "-fsyntax-only", "-x", "c", "-"]
    assert subprocess.run(command, input=program, text=True).returncode == 0
