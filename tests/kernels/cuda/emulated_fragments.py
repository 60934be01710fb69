"""Kernels of weights in fragments as `gluon_emulator` runs them."""

from __future__ import annotations

from types import ModuleType

from specc.kernels.cuda import act_and_mul, arrivals, linear_q_fragments_loop, linear_q_unpack
from tests.kernels.cuda.gluon_emulator import Launcher, emulated


def launcher(module: ModuleType, name: str, *parts: ModuleType) -> Launcher:
    """Of a kernel of this module, with all that it calls, some of it in further modules."""
    copy = emulated(module, linear_q_unpack, linear_q_fragments_loop, act_and_mul, arrivals, *parts)
    return Launcher(getattr(copy, name), ("launch_pdl",))
