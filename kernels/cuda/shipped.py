"""One compiled configuration of a Triton kernel, as data.

Every file of this package lists its own in `shipped(capability)`: what an engine may launch on a
device of that compute capability (80, 90, 100, 120). A process without a GPU compiles them ahead
of time and looks at registers, spills and shared memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

CAPABILITIES = (80, 90, 100, 120)
# dtype of a tensor → name of the type in a kernel's signature
TYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
# alignment of tensors from torch's allocator, and what Triton specializes integers on
ALIGNMENT = 16
# dtype → names of tensors; float → names of numbers
Types = dict[Any, tuple[str, ...]]
# integers of a launch that are multiples of 16 if the size of the vocabulary is one
VOCAB_INTEGERS = ("row_stride", "vocab")


@dataclass(frozen=True)
class Shipped:
    """A configuration of a kernel that ships.

    Args:
        name: unique in its file, for tables: "bf16-d128-rows16".
        signature: argument → type ("*bf16", "i32", "fp32"), for all that are not constexprs.
        constexprs: argument → value; None for an absent pointer.
        num_warps: warps of a program.
        num_stages: stages of its software pipeline.
        divisible: arguments that are multiples of 16 (pointers: aligned to 16 bytes). Integers that
            never are, or not always, are among `do_not_specialize` of the kernel: Triton would
            compile it anew for a 1, and for a multiple of 16, and no table would have that.
        max_registers: registers that a thread may have; None leaves it to ptxas.
        is_fused: multiplications are fused with additions.
        is_dependent: launched as `specc.kernels.cuda.dependent` says.
        early: arguments that such a kernel may load before it waits, past the first-level cache.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
    divisible: Iterable[str] = field(default=())
    max_registers: int | None = None
    is_fused: bool = True
    is_dependent: bool = False
    early: Iterable[str] = field(default=())

    @classmethod
    def of(
        cls,
        name: str,
        kernel: Any,
        *types: Mapping[Any, Iterable[str]],
        early: Any = (),
        unaligned: Any = (),
        **given: Any,
    ) -> Shipped:
        """What a launch with the keywords `given` compiles: constexprs, absent tensors and options.

        All arguments but these and those of `types` are integers. Tensors, and integers that the
        kernel specializes on, are multiples of 16.

        Args:
            types: tensors that `given` says are None included; several where one dtype may be
                another.
            early: names, as the class has them.
            unaligned: names of tensors that begin anywhere.
        """
        parameters = inspect.signature(kernel.fn).parameters
        items = [item for part in types for item in part.items()]
        typed = {argument: dtype for dtype, names in items for argument in names}
        constexprs, signature = {}, {}
        for argument, parameter in parameters.items():
            if argument in given:
                constexprs[argument] = given.pop(argument)
            elif argument in typed:
                dtype = typed[argument]
                pointer = isinstance(dtype, torch.dtype)
                signature[argument] = f"*{TYPE_NAMES[dtype]}" if pointer else "fp32"
            elif parameter.default is not parameter.empty:
                constexprs[argument] = parameter.default
            elif "constexpr" not in str(parameter.annotation):
                signature[argument] = "i32"
        fixed = {*unaligned, *_not_specialized(kernel)}
        aligned = [x for x, kind in signature.items() if kind != "fp32" and x not in fixed]
        options = {"num_warps": 4, "num_stages": 3} | given
        options["max_registers"] = options.pop("maxnreg", None)
        options["is_fused"] = options.pop("enable_fp_fusion", True)
        return cls(name, kernel, signature, constexprs, **options, divisible=aligned, early=early)

    @property
    def attrs(self) -> dict[tuple[int, ...], list[list[Any]]]:
        """Divisibility as `triton.compiler.ASTSource` takes it."""
        names = list(self.kernel.arg_names)
        return {(names.index(name),): [["tt.divisibility", ALIGNMENT]] for name in self.divisible}

    @property
    def options(self) -> dict[str, int]:
        """Options of `triton.compile`."""
        given = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        given |= {} if self.max_registers is None else {"maxnreg": self.max_registers}
        given |= {} if self.is_fused else {"enable_fp_fusion": False}
        return given | ({"launch_pdl": True} if self.is_dependent else {})

    def source(self) -> Any:
        """What `triton.compile` takes; needs a process without `TRITON_INTERPRET`."""
        from triton.compiler import ASTSource

        names = list(self.kernel.arg_names)
        given = {**self.signature, **dict.fromkeys(self.constexprs, "constexpr")}
        if sorted(given) != sorted(names):
            differ = sorted(set(given) ^ set(names))
            raise ValueError(
                f"{self.name}: found arguments that differ in {differ}; needed {names}"
            )
        signature = {name: given[name] for name in names}
        source = ASTSource
        if self.kernel.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource

            source = GluonASTSource
        return source(self.kernel, signature, dict(self.constexprs), self.attrs)


def _not_specialized(kernel: Any) -> set[str]:
    """Arguments that a kernel has one binary for, whatever they are and wherever they begin."""
    # Triton's interpreter keeps them in another place
    said = getattr(kernel, "kwargs", None) or vars(kernel)
    names = ("do_not_specialize", "do_not_specialize_on_alignment")
    return {name for key in names for name in said.get(key) or ()}


def with_any_vocab(item: Shipped, **odd: Any) -> Iterator[Shipped]:
    """A configuration, and the same for vocabularies that are no multiple of 16.

    50257 tokens are none, nor are 32000 and one for padding: rows of logits are not aligned then.
    Float32 and float16 are left out: their loads are as wide as bfloat16's or wider. `odd` replaces
    fields of the second.
    """
    yield item
    if item.signature.get("logits", "*bf16") != "*bf16":
        return
    divisible = tuple(name for name in item.divisible if name not in VOCAB_INTEGERS)
    yield replace(item, name=f"{item.name}-odd", divisible=divisible, **odd)
