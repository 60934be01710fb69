"""Run a Gluon kernel on a CPU: a group of warps is a thread, a tile is a tensor.

Triton's interpreter does not know Gluon. Here the source of a module is run as Python, with names
of Gluon that stand for functions of torch. What the hardware does besides arithmetic is strict:
copies come when their barrier hears of them and not before (until then what they write is NaN), a
barrier counts arrivals, as many as it was made for, and a wait that nobody ends is an error.
Elements before or after those of a tensor are one too.
Inline assembly is run, instruction after instruction (`ptx_pairs.py`).
Layouts are ignored. Tiles are computed in the types that they have; 64 unsigned bits shift as such.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.kernels.cuda import ptx_pairs

# of a product: warps that copy have time to go too far ahead if nothing holds them
PRODUCT_S = 0.003
# what a wait takes if nothing is wrong is far less
PATIENCE_S = 20.0
_NAN = float("nan")
# of integers, what memory holds that nothing has written
_NO_WORD = 0x5A3C7E19


class Tile(torch.Tensor):
    """Registers of a group of warps."""

    # what a kernel asks of it is its layout
    type = SimpleNamespace(layout=None)

    def to(self, dtype: Any, bitcast: bool = False) -> Any:  # type: ignore[override]
        if dtype == "uint64":
            return self.as_subclass(Unsigned)
        if dtype == "uint32":
            return (torch.Tensor.to(self, torch.int64) & 0xFFFFFFFF).as_subclass(Tile)
        if bitcast:
            return self.contiguous().view(dtype).as_subclass(Tile)
        return torch.Tensor.to(self, dtype).as_subclass(Tile)


class Unsigned(Tile):
    """64 bits that shift right without their sign."""

    def __rshift__(self, count: Any) -> Any:
        count = torch.as_tensor(count)
        kept = torch.where(count == 0, -1, ~(torch.tensor(-1) << (64 - count)))
        return (torch.Tensor.__rshift__(self, count) & kept).as_subclass(Unsigned)


def tile(x: Any) -> Any:
    return x if isinstance(x, Tile) else torch.as_tensor(x).as_subclass(Tile)


class Pointer:
    """Elements of a flat tensor."""

    def __init__(self, flat: Tensor, offset: Any = 0) -> None:
        self.flat, self.offset = flat, tile(offset)
        self.dtype = SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.flat, self.offset + other)


@dataclass
class Shared:
    """Shared memory of a program."""

    data: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, i: Any) -> Shared:
        return Shared(self.data[int(i)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(*order))

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Shared:
        return Shared(self.data.view(dtype).view(tuple(shape)))

    def slice(self, first: int, count: int, dim: int) -> Shared:
        return Shared(self.data.narrow(dim, first, count))

    def store(self, x: Tensor) -> None:
        self.data.copy_(x)

    def load(self, layout: Any) -> Any:
        return tile(self.data.clone())


class Barrier:
    """Counts arrivals; a phase ends with as many as it was made for."""

    def __init__(self) -> None:
        self.count = self.pending = self.phase = 0
        self.changed = threading.Condition()

    def arrive(self, count: int) -> None:
        with self.changed:
            self.pending -= count
            if self.pending < 0:
                raise RuntimeError("found more arrivals than a phase has")
            if self.pending == 0:
                self.phase += 1
                self.pending = self.count
                self.changed.notify_all()

    def wait(self, parity: Any) -> None:
        def is_over() -> bool:
            return self.phase & 1 != int(parity) or bool(_group.program.failed)

        with self.changed:
            is_there = self.changed.wait_for(is_over, timeout=PATIENCE_S)
        if not is_there or _group.program.failed:
            raise RuntimeError("found a wait that nobody ends")


class Barriers:
    """Several of them, in shared memory."""

    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.all[int(i)]


@dataclass
class Program:
    index: tuple[int, ...]
    grid: tuple[int, ...]
    failed: list[BaseException] = field(default_factory=list)


class _Group(threading.local):
    """The group of warps of this thread: its program, warps, and copies that are on their way."""

    program: Program
    warps = 4
    copies: list[tuple[Shared, Pointer, Any]]
    # of copies that were committed, those that none has waited for
    committed: list[list[tuple[Shared, Pointer, Any]]]


_group = _Group()


def _check_inside(p: Pointer, offset: Tensor) -> None:
    """Refuse what tensors would count from their end, or find in their neighbors."""
    if offset.numel() and not 0 <= int(offset.min()) <= int(offset.max()) < p.flat.numel():
        span = f"{int(offset.min())} to {int(offset.max())}"
        raise IndexError(f"found elements {span}; needed some of {p.flat.numel()}")


def _load(p: Pointer, mask: Any = None, other: Any = 0, **_: Any) -> Any:
    mask = True if mask is None else mask
    mask, offset = torch.broadcast_tensors(tile(mask), p.offset)
    _check_inside(p, offset[mask])
    if not p.flat.numel():
        return tile(torch.full(offset.shape, other, dtype=p.flat.dtype))
    found = p.flat[torch.where(mask, offset, 0).long()]
    return tile(torch.where(mask, found, torch.tensor(other, dtype=found.dtype)))


def _store(p: Pointer, x: Any, mask: Any = True) -> None:
    mask, offset, x = torch.broadcast_tensors(tile(mask), p.offset, tile(x))
    _check_inside(p, offset[mask])
    p.flat[offset[mask].long()] = x[mask].to(p.flat.dtype)


def _exchange(p: Pointer, new: Callable[[Tensor], Any]) -> Any:
    """What stands there, and then something else."""
    found = _load(p)
    _store(p, new(found))
    return found


def _copy(shared: Shared, p: Pointer, mask: Any = None, **_: Any) -> None:
    shared.data.fill_(_NAN if shared.dtype.is_floating_point else _NO_WORD)
    _group.copies.append((shared, p, mask))


def _commit() -> None:
    _group.committed.append(_group.copies)
    _group.copies = []


def _wait_for_groups(outstanding: int) -> None:
    while len(_group.committed) > outstanding:
        for shared, p, mask in _group.committed.pop(0):
            shared.data.copy_(_load(p, mask, 0))


def _arrive_after_copies(barrier: Barrier, increment_count: bool = True) -> None:
    if increment_count:
        raise NotImplementedError("found increment_count; needed barriers that expect all threads")
    for shared, p, mask in _group.copies:
        shared.data.copy_(_load(p, mask, 0.0))
    _group.copies = []
    barrier.arrive(32 * _group.warps)


def _multiply(a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    time.sleep(PRODUCT_S)
    product = (a.data if isinstance(a, Shared) else a).float() @ b.data.float()
    return tile(acc + product if use_acc else product)


def _specialize(functions: Any, warps: list[int], registers: list[int]) -> None:
    program = _group.program

    def run(function: Callable[..., Any], args: Any, count: int) -> None:
        _group.program, _group.warps, _group.copies = program, count, []
        try:
            function(*args)
            if _group.copies:
                raise RuntimeError("found copies that no barrier hears of")
        except BaseException as error:
            program.failed.append(error)

    groups = zip(functions, [4, *warps], strict=True)
    threads = [threading.Thread(target=run, args=(*part, count)) for part, count in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if program.failed:
        raise program.failed[0]


def _allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
    if dtype == torch.int64:
        return Barriers(shape[0])
    poison = _NAN if dtype.is_floating_point else _NO_WORD
    return Shared(torch.full(tuple(shape), poison, dtype=dtype))


def _initialise(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def _reduce(x: Any, axis: int, combine: Callable[..., Any]) -> Any:
    parts = x.unbind(axis)
    total = parts[0]
    for part in parts[1:]:
        total = combine(total, part)
    return total


def _multiply_fragments(a: Any, b: Any, acc: Any) -> Any:
    return tile(acc + a.float() @ b.float())


def _assembly(
    text: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int
) -> Any:
    # where layouts hold, a thread has such elements one after the other
    if dtype == torch.int32:
        (found,) = ptx_pairs.run_words(text, [arg.unsqueeze(-1) for arg in args], 1)
        return tile(found.to(torch.int32))
    assert constraints.count("=&r") == len(dtype)
    found = ptx_pairs.run(text, [arg.unflatten(-1, (-1, pack)) for arg in args], len(dtype))
    return tuple(tile(item.flatten(-2)) for item in found)


def _nothing(*_: Any, **__: Any) -> None: ...


def _of_two(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: tile(function(tile(a), tile(b)))


def _unsqueezed(x: Any, axis: int) -> Any:
    if isinstance(x, Pointer):
        return Pointer(x.flat, x.offset.unsqueeze(axis))
    return x.unsqueeze(axis)


def _language() -> ModuleType:
    gl = ModuleType("triton.experimental.gluon.language")
    vars(gl).update(
        constexpr=lambda x: x, static_range=range, bfloat16=torch.bfloat16,
        float32=torch.float32, int32=torch.int32, int64=torch.int64, uint32="uint32",
        uint64="uint64",
        BlockedLayout=_nothing, SliceLayout=_nothing, NVMMADistributedLayout=_nothing,
        DotOperandLayout=_nothing, NVMMASharedLayout=SimpleNamespace(get_default_for=_nothing),
        SwizzledSharedLayout=_nothing, DistributedLinearLayout=_nothing,
        convert_layout=lambda x, *_, **__: x,
        join=lambda a, b: tile(torch.stack([a, b], -1)), split=lambda x: x.unbind(-1),
        reshape=lambda x, shape: x.reshape(shape), permute=lambda x, order: x.permute(order),
        inline_asm_elementwise=_assembly,
        program_id=lambda axis: tile(_group.program.index[axis]),
        num_programs=lambda axis: tile(_group.program.grid[axis]),
        arange=lambda begin, end, _: tile(torch.arange(begin, end)),
        zeros=lambda shape, dtype, _: tile(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, x, dtype, _: tile(torch.full(shape, x, dtype=dtype)),
        expand_dims=_unsqueezed,
        where=lambda m, a, b: tile(torch.where(tile(m), tile(a), tile(b))),
        maximum=_of_two(torch.maximum), minimum=_of_two(torch.minimum),
        max=lambda x, axis: tile(x.amax(axis)), min=lambda x, axis: tile(x.amin(axis)),
        sum=lambda x, axis: tile(x.sum(axis)), reduce=_reduce,
        exp2=torch.exp2, log2=torch.log2, exp=torch.exp, erf=torch.erf, rsqrt=torch.rsqrt,
        load=_load, store=_store, debug_barrier=_nothing,
        atomic_add=lambda p, x, **_: _exchange(p, lambda found: found + x),
        atomic_xchg=lambda p, x, **_: _exchange(p, lambda _: x),
        allocate_shared_memory=_allocate, warp_specialize=_specialize,
    )  # fmt: skip
    return gl


def _unjitted(function: Any = None, **_: Any) -> Any:
    return function or (lambda f: f)


def _fakes() -> dict[str, ModuleType]:
    gl = _language()
    # functions of Triton that Gluon calls too, which make no tile of their own
    triton, tl = ModuleType("triton"), ModuleType("triton.language")
    vars(tl).update(vars(gl), __name__=tl.__name__)
    vars(triton).update(jit=_unjitted, language=tl)
    gluon = ModuleType("triton.experimental.gluon")
    hopper = ModuleType("triton.experimental.gluon.language.nvidia.hopper")
    ampere = ModuleType("triton.experimental.gluon.language.nvidia.ampere")
    vars(gluon).update(jit=_unjitted, constexpr_function=lambda f: f, language=gl)
    vars(ampere).update(
        async_copy=SimpleNamespace(
            async_copy_global_to_shared=_copy, commit_group=_commit, wait_group=_wait_for_groups
        ),
        mma_v2=_multiply_fragments,
    )
    vars(hopper).update(
        async_copy=SimpleNamespace(
            async_copy_global_to_shared=_copy, mbarrier_arrive=_arrive_after_copies
        ),
        mbarrier=SimpleNamespace(
            init=_initialise, wait=lambda barrier, parity: barrier.wait(parity),
            arrive=lambda barrier, count: barrier.arrive(count), MBarrierLayout=_nothing,
        ),
        fence_async_shared=_nothing,
        warpgroup_mma=_multiply,
        warpgroup_mma_wait=lambda _, deps: deps[0],
    )  # fmt: skip
    dependent = ModuleType("specc.kernels.cuda.dependent")
    vars(dependent).update(load_early=_load)
    vars(dependent).update(
        dict.fromkeys(("wait_for_earlier", "wait_alone", "let_next_start"), _nothing)
    )
    return {
        module.__name__: module for module in (triton, tl, gluon, gl, ampere, hopper, dependent)
    }


def emulated(module: ModuleType, *parts: ModuleType) -> ModuleType:
    """The module, run again from its source with names that stand for Gluon's.

    Args:
        parts: modules that it imports functions of kernels from; none of the others'.
    """
    fakes = _fakes()
    # an import of a name from a package looks at the package before it looks for a module
    parent = ModuleType("triton.experimental")
    vars(parent).update(gluon=fakes["triton.experimental.gluon"])
    fakes[parent.__name__] = parent
    before = {name: sys.modules.get(name) for name in (*fakes, *(part.__name__ for part in parts))}
    sys.modules.update(fakes)
    try:
        for part in parts:
            sys.modules[part.__name__] = _run_again(part)
        copy = _run_again(module)
    finally:
        for name, kept in before.items():
            if kept is None:
                del sys.modules[name]
            else:
                sys.modules[name] = kept
    return copy


def _run_again(module: ModuleType) -> ModuleType:
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_emulated", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    # what a kernel counts with is a scalar, as what it loads
    vars(copy)["range"] = lambda *ends: map(tile, range(*map(int, ends)))
    # dataclasses look their module up
    sys.modules[copy.__name__] = copy
    try:
        spec.loader.exec_module(copy)
    finally:
        del sys.modules[copy.__name__]
    return copy


class Launcher:
    """A kernel of such a module, launched as Triton's are: `kernel[grid](*args, **constexprs)`."""

    def __init__(self, kernel: Callable[..., Any], options: tuple[str, ...] = ()) -> None:
        self.kernel, self.options = kernel, ("num_warps", "num_stages", "maxnreg", *options)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **given: Any) -> None:
            named = {k: _passed(x) for k, x in given.items() if k not in self.options}
            arguments = [_passed(x) for x in args]
            for index in itertools.product(*map(range, grid)):
                _group.program, _group.copies, _group.committed = Program(index, grid), [], []
                self.kernel(*arguments, **named)
                if any(_group.committed) or _group.copies:
                    raise RuntimeError("found copies that no program waits for")

        return launch


def _passed(x: Any) -> Any:
    """An argument as a kernel has it: of a tensor the memory from its first element to its last."""
    if not isinstance(x, Tensor):
        return x
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    size = last + 1 if x.numel() else 0
    return Pointer(x.as_strided((size,), (1,)))
