"""The model that steps are predicted by, beside sums made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specc.bench.synthetic.nodes import Node
from specc.cost.graph_costs import ATTEND, OTHER, PRODUCT
from tests.measure.predict_steps import (
    DEPENDENT,
    FRAGMENTS,
    MIXTURES,
    ORDINARY,
    TODAY,
    Form,
    latent_few_s,
    node_seconds,
    step_ms,
)


def product(num_bytes: int, *sizes: int, model: str = "target") -> Node:
    return Node("linear_q_kernel", "linear_q", PRODUCT, model, num_bytes, product=sizes or None)


@pytest.mark.parametrize(
    ("form", "rows", "num_bytes", "wanted"),
    [
        # 4096 · 4096 weights, 128 programs of 32 outputs: by the copy's 4.19 TB/s,
        pytest.param(Form(0, 32, 1 << 20, 1, 0), 1, 419_000_000, 1e-4, id="bytes"),
        # 128 · 6 KiB asked for in each 0.75 µs: 1.05 TB/s,
        pytest.param(Form(0, 32, 6 << 10, 6, 0), 1, 8_912_896, 8.5e-6, id="in-flight"),
        # 8 · 2^24 / 32 instructions of 528 · 1.755e9 · 0.7,
        pytest.param(Form(8, 32, 1 << 20, 1, 0), 1, 1, 4194304 / 6.48648e11, id="instructions"),
        # 128 · 16 rows · 8 KiB of L2's 5.5 TB/s
        pytest.param(Form(0, 32, 1 << 20, 1, 0), 16, 0, 16777216 / 5.5e12, id="rows"),
    ],
)
def test_what_bounds_a_product(form: Form, rows: int, num_bytes: int, wanted: float) -> None:
    assert form.seconds(rows, 4096, 4096, num_bytes) == pytest.approx(wanted, rel=1e-6)
    later = Form(form.instructions, 32, form.in_flight, form.resident, DEPENDENT)
    assert later.seconds(rows, 4096, 4096, num_bytes) == pytest.approx(wanted + DEPENDENT)


def test_a_head_in_8_bits_is_no_product_in_4() -> None:
    sizes = 1, 4096, 4096
    four, eight = product(8_912_896, *sizes), product(16_900_000, *sizes)
    for forms in (TODAY, FRAGMENTS):
        found = [node_seconds(node, "int4", forms) for node in (four, eight)]
        assert found[0] == forms["int4"].seconds(*sizes, 8_912_896)
        assert found[1] == forms["int8"].seconds(*sizes, 16_900_000)


def test_a_norm_in_front_is_computed_once_by_each_program() -> None:
    """132 of them, with 6 rows, and 264, with one; each reads rows and what is added to them."""
    for rows, programs, norm in ((6, 132, 584), (1, 264, 111)):
        node = replace(product(1, rows, 28672, 4096), operator="add_norm_gate_up")
        slots = 1.9 * 28672 * 4096 / 32 + programs * 8 * 2 * norm
        found = node_seconds(node, "int4", FRAGMENTS)
        assert found == pytest.approx(DEPENDENT + slots / 6.48648e11)
        rows_alone = replace(FRAGMENTS["int4"], instructions=0, norm=1e-9, resident=programs // 132)
        shared = 4 * programs * rows * 4096 / 5.5e12
        assert rows_alone.seconds(rows, 28672, 4096, 0) == pytest.approx(DEPENDENT + shared)


def test_experts_of_a_token_are_one_product_of_all_that_it_has() -> None:
    """Of two layers: 3 · 2880² weights of each of four experts; 22 instructions bound, or bytes."""
    mixture = MIXTURES["gpt-oss-20b experts"]
    weights = 4 * 3 * 2880**2
    two = replace(mixture, layers=2)
    slots = Form(22, 32, 1 << 20, 4, 0)
    assert two.experts_ms(slots, 4.25) == pytest.approx(2e3 * 22 * weights / 32 / 6.48648e11)
    streamed = Form(0, 32, 1 << 20, 4, DEPENDENT)
    bytes_ms = 1e3 * weights * 4.25 / 8 / 4.19e12
    assert two.experts_ms(streamed, 4.25) == pytest.approx(2 * (bytes_ms + 2e3 * DEPENDENT))
    assert two.predict()["floor_ms"] == pytest.approx(2 * bytes_ms)


def test_mixtures_take_their_launches_bytes_and_attention() -> None:
    nodes = [
        product(4_190_000),
        Node("experts_down_kernel", "experts", PRODUCT, "target", 4_190_000, is_dependent=True),
        Node("topk", "topk", OTHER, "target", 9),
        Node("_rms_norm_kernel", "rms_norm", OTHER, "target", 9, is_dependent=True),
        Node("attend_latent_few_kernel", "attend", ATTEND, "target", 9),
        Node("accept_walk_kernel", "accept", OTHER, "", 9),
    ]
    launches = 2e-3 + (ORDINARY + 2 * DEPENDENT) * 1e3 + 4.7e-3 + 3.1e-3
    assert step_ms(nodes, {}, {}) == pytest.approx(launches + 1e3 * latent_few_s())


def test_attention_over_latents_waits_for_more_than_that_over_heads() -> None:
    """156,672 bytes of keys, queries and parts, 12 products, and two reads in series."""
    more = (73_728 - 32_768) + (18_432 - 1_024) + (131_072 - 32_768)
    seconds = 7.0e-6 + more / 112.32e9 + 12 * 33 / 1.755e9 + 0.6e-6
    assert latent_few_s() == pytest.approx(seconds)
    assert 9.0e-6 < latent_few_s() < 9.5e-6
