"""The backend torch-tensorrt: an engine for tensorrt, which torch-tensorrt builds."""

from __future__ import annotations

from collections.abc import Sequence

from specc.compiler.backends.base import UnfinishedEngine
from specc.compiler.backends.tensorrt import TensorRTCompiler
from specc.compiler.compiled_model import CompiledModel
from specc.passes.lower.experimental import torch_tensorrt
from specc.passes.lower.experimental.export_with_weights import read_weights
from specc.passes.lower.tensorrt.builder import BuildOptions
from specc.passes.lower.tensorrt.lower import BuildReport
from specc.passes.lower.tensorrt.shape_profile import ShapeProfile


class TorchTensorRTCompiler(TensorRTCompiler):
    """Builds from the padded programs instead of the ONNX files."""

    @property
    def options(self) -> tuple[str, ...]:
        """It builds for the GPU that it finds."""
        return ("decomposable_attention",)

    @property
    def name(self) -> str:
        return torch_tensorrt.BACKEND

    def check_machine(self) -> None:
        torch_tensorrt.check_machine()

    def build_model(
        self,
        engine: UnfinishedEngine,
        model: CompiledModel,
        rank: int | None,
        profiles: Sequence[ShapeProfile],
        options: BuildOptions,
    ) -> BuildReport:
        program = model.padded
        assert program is not None, "it was traced for the ONNX file"
        assert rank is None, "it does not take the option"
        return torch_tensorrt.build_engine(
            program,
            read_weights(program, engine.writer.path(model.entry.weights_file)),
            engine.writer.path(model.entry.plan_file),
            profiles,
            decomposable=options.decomposable,
            timing_cache=options.timing_cache,
        )


BACKEND = TorchTensorRTCompiler()
