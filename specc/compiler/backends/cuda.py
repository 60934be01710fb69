"""The backend cuda: graphs whose operators are Triton kernels, captured where they run."""

from __future__ import annotations

import importlib.util

import torch

from specc.artifact.backends import facts_of
from specc.compiler.backends.base import CompilerBackend
from specc.passes.lower.cuda.phases import cuda_phases, invariant_phases
from specc.passes.pipeline import Phases

# compute capabilities of GPUs that have run engines, with the right output (docs/design/cuda.md)
PROVEN = ((9, 0),)


class CudaCompiler(CompilerBackend):
    """Rewrites the graphs; kernels are compiled by the GPU's machine when it loads the engine."""

    facts = facts_of("cuda")
    aliases = ("gpu",)
    # its sums and norms are one operator: between two layers two values are alive
    cuts_first = True
    # what a pass costs besides its tokens (launches, weights) is to be a small part of it: 2048
    # tokens of an 8B model are some 30 TFLOP, against 16 GB of weights
    prefill_chunk = 2048

    def is_default(self) -> bool:
        """Where a GPU is that has shown it; others compile for it where they are asked to."""
        if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
            return False
        try:
            return torch.cuda.get_device_capability() in PROVEN
        except RuntimeError:
            # a GPU that CUDA cannot use: a forked process, or a driver that fails
            return False

    def phases(self, max_seq_len: int, pass_tokens: int | None = None) -> Phases:
        return cuda_phases(max_seq_len, pass_tokens)

    def invariant_phases(self, phases: Phases) -> Phases:
        return invariant_phases(phases)


BACKEND = CudaCompiler()
