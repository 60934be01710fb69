"""Let sums of a row have an order that nothing else in a pass decides, or refuse the program."""

from __future__ import annotations

from torch import fx

from specc.artifact.graph_io import target_name
from specc.artifact.kv_rows import holds_quantized
from specc.artifact.quantized_layout import QuantizedLayout
from specc.errors import ConfigError
from specc.kernels import ops
from specc.kernels.operators.mixtures import MOST_CHOSEN, MOST_EXPERTS
from specc.passes.base import Pass, PassResult
from specc.passes.program import Program, bind_args, emit_call, module_path, replace
from specc.passes.proof.token_routing import FACTORS

# operators of specc that add up each row by itself, in tiles that go by its width, or add up none
_BY_ROW = (
    ops.rms_norm, ops.add_rms_norm, ops.act_and_mul, ops.rope_write, ops.norm_rope_write,
    ops.write_kv, ops.write_rows, ops.lookup, ops.invariant_linear, ops.invariant_linear_q,
    ops.invariant_attend, ops.invariant_experts, ops.route,
)  # fmt: skip
# Triton compiles a kernel anew where strides are multiples of so many, as those of a lone row, 0,
# are in any case: the same row would be summed up in another order among others
_ALIGNED = 16
# norms, and whose rows they are of
_NORMS = {ops.rms_norm: "x", ops.add_rms_norm: "x", ops.norm_rope_write: "q"}
# these say what drafts may look at: logits do not depend on them
_FOR_DRAFTS = (ops.block_mass,)
# of torch's operators those that add up. Its `layer_norm` is none of them: it has one block of
# threads for each row, as wide as the row says (layer_norm_kernel.cu)
_SUMS = FACTORS.keys() | {
    "softmax", "_softmax", "log_softmax", "_log_softmax", "logsumexp", "sum", "mean", "prod",
    "norm", "linalg_vector_norm", "var", "std", "var_mean", "std_mean", "cumsum", "cumprod",
    "logcumsumexp", "rms_norm",
}  # fmt: skip


class FixRowSums(Pass):
    """Products, attention, experts → `invariant_linear`, `…_q`, …; others are refused.

    It is the last pass of a target. What is left of torch's operators works element by element,
    moves numbers or compares them: `verify_tokenwise` knows no others.
    """

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.calls(ops.skinny_linear):
            _replace(node, ops.invariant_linear, bind_args(node))
            result.rewrites += 1
        for node in program.calls(ops.linear_q):
            _fix_quantized(node)
            result.rewrites += 1
        for node in program.calls(ops.attend):
            _fix_attention(node)
            result.rewrites += 1
        for node in program.calls(ops.experts):
            _fix_experts(node)
            result.rewrites += 1
        for node in program.graph.nodes:
            if node.op == "call_function":
                _check(node)
        return result


def _fix_quantized(node: fx.Node) -> None:
    bound = bind_args(node)
    layout = QuantizedLayout.of_facts(node.args[4:])
    if not layout.is_fragments:
        raise _refusal(
            node, f"a product by {layout.name}", "pass --weight-fragments --dtype bfloat16"
        )
    _replace(node, ops.invariant_linear_q, bound)


def _fix_attention(node: fx.Node) -> None:
    bound = bind_args(node)
    if bound.pop("values_in_keys"):
        raise _refusal(node, "attention over latents", "pass --mla-cache expanded")
    if holds_quantized(bound["k_cache"].meta["val"].dtype):  # type: ignore[attr-defined]
        raise _refusal(node, "quantized caches", "leave out --kv-cache-dtype")
    # no pass makes graphs for this device so: `expands_prompts` of its facts
    assert not bound.pop("most_rows"), "no rows that are expanded on this device"
    _replace(node, ops.invariant_attend, bound)


def _fix_experts(node: fx.Node) -> None:
    """More of a token go by the number of tokens, as does a router of more than it has room for."""
    bound = bind_args(node)
    ids = bound["ids"]
    chosen = ids.meta["val"].shape[1]  # type: ignore[attr-defined]
    if chosen > MOST_CHOSEN:
        raise _refusal(node, f"{chosen} experts of a token", "pass --backend cpu")
    _replace(node, ops.invariant_experts, bound)


def _replace(node: fx.Node, target: object, bound: dict[str, object]) -> None:
    names = [x.name for x in target._schema.arguments if not x.kwarg_only]  # type: ignore[attr-defined]
    args = [bound.pop(name) for name in names]
    with node.graph.inserting_before(node):
        found = emit_call(node.graph, target, *args, **bound)  # type: ignore[arg-type]
    found.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
    replace(node, found)


def _check(node: fx.Node) -> None:
    name = target_name(node.target)
    if node.target in _NORMS:
        columns = bind_args(node)[_NORMS[node.target]].meta["val"].shape[-1]
        if columns % _ALIGNED:
            raise _refusal(node, f"a norm of {columns} columns", "pass --backend cpu")
    if node.target is ops.route:
        experts = bind_args(node)["weight"].meta["val"].shape[0]
        if experts > MOST_EXPERTS:
            raise _refusal(node, f"a router of {experts} experts", "pass --backend cpu")
    if name.startswith("specc."):
        is_known = node.target in (*_BY_ROW, *_FOR_DRAFTS)
    else:
        is_known = name.removeprefix("aten.").partition(".")[0] not in _SUMS
    if not is_known:
        raise _refusal(node, target_name(node.target), "pass --backend cpu")


def _refusal(node: fx.Node, what: str, do: str) -> ConfigError:
    where = module_path(node)
    return ConfigError(
        f"--batch-invariant, and {what} in {where or node.name}: on backend cuda its sums have an"
        " order that goes by what else is in a pass",
        "products by weights in fragments, or not quantized, attention over keys and values,"
        f" mixtures of up to {MOST_EXPERTS} experts, {MOST_CHOSEN} of a token, and norms of"
        f" multiples of {_ALIGNED} columns",
        f"{do}, or leave out --batch-invariant",
    )
