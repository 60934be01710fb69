"""What TensorRT-RTX says of collectives without a GPU: facts in docs/notebook/onnx-tensorrt.md."""

from __future__ import annotations

from typing import Any

import pytest

from specc.passes.lower.onnx.operators import COLLECTIVE, SUM


class Network:
    """A network of one sum, parsed from ONNX or made by the API."""

    def __init__(self) -> None:
        self.trt = trt = pytest.importorskip("tensorrt_rtx")

        class Quiet(trt.ILogger):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()

            def log(self, severity: Any, message: str) -> None:
                """What it says without a driver is no news."""

        self._logger = Quiet()
        self.builder = trt.Builder(self._logger)
        typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        self.network = self.builder.create_network(typed)

    def parse(self, **attributes: Any) -> str:
        """Parse a node DistCollective; the first error, or nothing."""
        onnx = pytest.importorskip("onnx")
        helper, half = onnx.helper, onnx.TensorProto.FLOAT16
        node = helper.make_node(COLLECTIVE, ["x"], ["y"], **attributes)
        values = [helper.make_tensor_value_info(name, half, ["rows", 64]) for name in ("x", "y")]
        graph = helper.make_graph([node], "sum", values[:1], values[1:])
        opset = helper.make_opsetid("", 24)
        model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
        parser = self.trt.OnnxParser(self.network, self._logger)
        is_parsed = parser.parse(model.SerializeToString())
        return "" if is_parsed else str(parser.get_error(0).desc())

    def build(self) -> int:
        """Bytes of the engine for one GPU that is not here."""
        config, profile = (
            self.builder.create_builder_config(),
            self.builder.create_optimization_profile(),
        )
        profile.set_shape("x", (1, 64), (8, 64), (64, 64))
        config.add_optimization_profile(profile)
        config.num_compute_capabilities = 1
        config.set_compute_capability(self.trt.ComputeCapability.SM89, 0)
        plan = self.builder.build_serialized_network(self.network, config)
        return 0 if plan is None else int(plan.nbytes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_api_has_sums_of_ranks_and_builds_them(dtype: str) -> None:
    made = Network()
    trt = made.trt
    x = made.network.add_input("x", getattr(trt, dtype), (-1, 64))
    groups: Any = pytest.importorskip("numpy").array([], dtype="int64")
    operation, kind = trt.CollectiveOperation.ALL_REDUCE, trt.ReduceOperation.SUM
    layer = made.network.add_dist_collective(x, operation, kind, -1, groups)
    assert layer is not None
    layer.num_ranks = 2
    assert layer.type == trt.LayerType.DIST_COLLECTIVE
    assert tuple(layer.get_output(0).shape) == (-1, 64)
    layer.get_output(0).name = "y"
    made.network.mark_output(layer.get_output(0))
    assert made.build() > 0
    assert hasattr(trt.IExecutionContext, "set_communicator")


def test_the_parser_reads_a_node_that_is_not_of_onnx() -> None:
    made = Network()
    assert made.parse(**SUM, nb_rank=2) == ""
    layer = made.network.get_layer(0)
    assert layer.type == made.trt.LayerType.DIST_COLLECTIVE
    assert layer.num_ranks == 2
    assert made.build() > 0


def test_a_sum_has_no_root() -> None:
    """Left out it is 0, which is refused."""
    assert "root == -1" in Network().parse(**(SUM | {"root": 0}))
