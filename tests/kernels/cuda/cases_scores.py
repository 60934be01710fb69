"""Cases of `attend` whose scores are more than products: slopes, chunks, sinks, softcaps, codes."""

from __future__ import annotations

from dataclasses import replace

from specc.artifact.kv_rows import FP8, INT8, QUANTIZED_ROWS
from tests.kernels.cuda.cases_attend import BF16, CASES, F16, Case

SLOPED_CASES = {
    "tree": Case(((7, 40), (1, 10), (5, 32)), splits=2, slopes=0.5),
    "tree-half": Case(((9, 100), (3, 63)), True, F16, block_size=64, splits=2, slopes=0.25),
    "tree-of-64": Case(((64, 5),), heads=(2, 1), sizes=(16, 16), num_words=2, slopes=0.1),
    # steps of 64 keys: both halves of their bits
    "tree-of-64-half": Case(((64, 5),), True, F16, (2, 1), (16, 16), slopes=0.3),
    "tree-of-3-words": Case(((65, 61),), True, F16, (2, 1), (16, 16), first_node=65, slopes=0.1),
    "tree-of-4-words": Case(((250, 30),), heads=(1, 1), sizes=(16, 16), slopes=0.2),
    "draft-level": Case(((4, 70), (4, 31)), first_node=9, splits=2, slopes=0.5),
    "tree-window-sink": Case(((7, 200), (3, 10)), True, F16, window=20, sink=5, slopes=0.05),
    "prefill": Case(((40, 0), (23, 50)), False, F16, slopes=0.3),
    "prefill-fp32": Case(((19, 30), (1, 77)), False, sizes=(32, 32), splits=2, slopes=0.3),
    "dead-tokens": Case(((5, 70), (2, 9), (4, 20)), dead=(1, 5, 6, 10), tail=3, slopes=0.4),
    # what wide and few rows take where there are no slopes
    "wide": Case(((24, 150),), True, BF16, (4, 2), (128, 128), slopes=0.02),
    "few": Case(((3, 150),), True, BF16, (4, 2), (64, 64), slopes=0.02),
    "rounded": Case(((7, 700),), heads=(2, 2), splits=2, slopes=0.01, rounds=True),
    "rounded-prefill": Case(((40, 300),), False, heads=(2, 1), slopes=0.02, rounds=True),
}
CHUNKED_CASES = {
    # sequences in their first chunk, at its end, and in a later one
    "plain-decode": Case(((1, 40), (1, 31), (1, 32), (1, 3)), False, splits=2, chunk=32),
    # trees that cross into the next chunk, begin with one, and lie within one
    "tree": Case(((9, 46), (7, 48), (5, 17)), splits=2, chunk=16),
    "tree-half": Case(((9, 125), (3, 63)), True, F16, block_size=64, splits=2, chunk=64),
    "tree-of-several-chunks": Case(((64, 5),), heads=(2, 1), sizes=(16, 16), chunk=3),
    # steps of 64 keys: both halves of their bits
    "tree-of-64-half": Case(((64, 5),), True, F16, (2, 1), (16, 16), chunk=5),
    "tree-of-3-words": Case(((65, 61),), True, F16, (2, 1), (16, 16), first_node=65, chunk=7),
    "draft-level": Case(((4, 70), (4, 31)), first_node=9, splits=2, chunk=36),
    "tree-window-sink": Case(
        ((7, 200), (3, 10)), True, F16, (4, 2), (64, 64), window=20, sink=5, chunk=150
    ),
    "prefill": Case(((40, 0), (23, 50)), False, F16, chunk=24),
    # blocks of keys that every row of a tile sees, after a chunk's beginning
    "prefill-within": Case(((20, 300),), False, F16, (2, 1), (16, 16), chunk=200),
    "prefill-fp32": Case(((19, 30), (1, 77)), False, sizes=(32, 32), splits=2, chunk=40),
    "prefill-crosses": Case(((70, 230),), False, F16, (2, 1), (16, 16), chunk=256),
    # tiles, and steps of keys, of many chunks
    "prefill-of-many": Case(((70, 11), (9, 3)), False, F16, (2, 1), (16, 16), chunk=5),
    "of-one-position": Case(((9, 20),), True, F16, (2, 1), (16, 16), chunk=1),
    # windows within chunks and beyond them, with sinks before a chunk and within it
    "prefill-window-sink": Case(
        ((70, 130),), False, F16, (2, 1), (16, 16), window=33, sink=140, chunk=128
    ),
    "tree-sink-within": Case(
        ((7, 200),), True, F16, (2, 1), (16, 16), window=20, sink=160, chunk=150
    ),
    "wider-window": Case(((12, 90), (2, 3)), False, heads=(2, 1), window=70, sink=40, chunk=24),
    "tiles-of-128": Case(((37, 90), (2, 5)), True, BF16, (7, 1), (32, 32), splits=2, chunk=60),
    "dead-tokens": Case(((5, 70), (2, 9), (4, 20)), dead=(1, 5, 6, 10), tail=3, chunk=12),
    # what wide and few rows take where there are no chunks
    "wide": Case(((24, 150),), True, BF16, (4, 2), (128, 128), chunk=100),
    "few": Case(((3, 150),), True, BF16, (4, 2), (64, 64), chunk=100),
    "slopes": Case(((9, 46), (1, 10)), splits=2, slopes=0.2, chunk=16),
    "slopes-of-3-words": Case(
        ((65, 61),), True, F16, (2, 1), (16, 16), first_node=65, slopes=0.1, chunk=20
    ),
    "slopes-of-a-prefill": Case(((40, 0), (23, 50)), False, F16, slopes=0.3, chunk=24),
    "chosen-splits": Case(((2, 150), (1, 300)), heads=(2, 1), splits=None, chunk=128),
    "one-of-chosen-splits": Case(((2, 450),), heads=(2, 1), splits=None, chunk=256),
}
# splits without keys, dead rows, trees, chains and prompts, with and without windows; kernels of
# few and of wide rows have cases of their own
SINK_CASES = {
    "plain-decode": Case(((1, 40), (1, 0), (1, 33)), False, splits=2, sinks=2.0),
    "tree": Case(((7, 40), (1, 10), (5, 32)), splits=2, sinks=3.0),
    "tree-odd-pages": Case(
        ((5, 70), (0, 12), (9, 130)), True, F16, (6, 2), (80, 80), 7, splits=3, sinks=5.0
    ),
    "tree-whole-pages": Case(((9, 100), (3, 63)), True, BF16, block_size=64, splits=2, sinks=4.0),
    "tree-window": Case(((5, 90), (3, 10)), heads=(2, 1), window=20, splits=3, sinks=2.5),
    "tree-window-sink": Case(
        ((7, 200), (3, 10)), True, F16, window=20, sink=5, splits=2, sinks=3.0
    ),
    "far-window": Case(((2, 900),), True, F16, (2, 1), (16, 16), 0, window=50, splits=4, sinks=2.0),
    "prefill-window": Case(
        ((40, 60), (1, 100), (9, 0)), False, BF16, window=20, splits=2, sinks=2.0
    ),
    "prefill-fp32": Case(((19, 30), (1, 77)), False, sizes=(32, 32), splits=2, sinks=4.0),
    "empty-splits": Case(((3, 40), (2, 0)), True, heads=(2, 1), splits=8, sinks=2.0),
    "many-splits": Case(((3, 600), (2, 300)), heads=(2, 1), sizes=(16, 16), splits=19, sinks=6.0),
    "dead-tokens": Case(
        ((5, 70), (2, 9), (4, 20)), dead=(1, 5, 6, 10), tail=3, splits=2, sinks=2.0
    ),
    "dead-batch": Case(((2, 7), (1, 3)), dead=(0, 1, 2), splits=2, sinks=2.0),
    "value-size": Case(((5, 70),), True, F16, (4, 1), (64, 40), splits=2, sinks=3.0),
    "chosen-splits": Case(((2, 150),), heads=(2, 1), splits=None, sinks=3.0),
    "slopes": Case(((7, 200), (3, 10)), True, F16, window=20, sink=5, slopes=0.05, sinks=2.0),
    "chunks": Case(((9, 46), (7, 48), (5, 17)), splits=2, chunk=16, sinks=2.0),
}
SOFTCAP_CASES = {
    "plain-decode": Case(((1, 40), (1, 0), (1, 33)), False, splits=2, softcap=2.0),
    "tree": Case(((7, 40), (1, 10), (5, 32)), splits=2, softcap=0.7),
    "tree-half": Case(((9, 100), (3, 63)), True, F16, block_size=64, splits=2, softcap=1.0),
    # Gemma 2's, which cuts none of these
    "of-50": Case(((7, 40), (1, 10)), True, BF16, splits=2, softcap=50.0),
    "tree-window-sink": Case(((7, 200), (3, 10)), True, F16, window=20, sink=5, softcap=1.0),
    "prefill-window": Case(((40, 60), (1, 100), (9, 0)), False, BF16, window=20, softcap=1.5),
    "prefill-fp32": Case(((19, 30), (1, 77)), False, sizes=(32, 32), splits=2, softcap=0.5),
    "dead-tokens": Case(((5, 70), (2, 9), (4, 20)), dead=(1, 5, 6, 10), tail=3, softcap=1.0),
    "head-256": Case(((4, 70),), True, BF16, (2, 1), (256, 256), splits=2, softcap=2.0),
    "sinks": Case(((7, 40), (1, 10), (5, 32)), splits=2, softcap=0.7, sinks=2.0),
    "sinks-window": Case(
        ((5, 90), (3, 10)), True, F16, (2, 1), window=20, splits=3, softcap=1.0, sinks=2.0
    ),
    "slopes": Case(((7, 40), (1, 10)), splits=2, slopes=0.3, softcap=0.7),
    "slopes-rounded": Case(
        ((7, 300),), True, F16, heads=(2, 2), slopes=0.01, rounds=True, softcap=0.7
    ),
    "chunks": Case(((9, 46), (7, 48)), splits=2, chunk=16, softcap=0.7),
}
# quantized caches: every shape of a pass, of one kind or the other, and some of both
CODED_CASES = {
    **{
        name: replace(CASES[name], rows=QUANTIZED_ROWS[i % 2])
        for i, name in enumerate(
            (
                "plain-decode", "two-tokens-catch-up", "tree-odd-pages", "tree-dense",
                "tree-whole-pages", "tree-of-3-words", "tree-tiles-of-128", "tree-aligned",
                "draft-level", "tree-window", "tree-window-sink", "sink-beyond-window", "prefill",
                "prefill-fp32", "prefill-window", "prefill-window-sink", "dead-tokens",
                "dead-batch", "value-size", "head-192", "head-128", "head-256", "head-256-fp32",
                "head-8", "many-splits", "empty-splits", "chosen-splits",
            )
        )
    },
    **{f"tree-{kind}": replace(CASES["tree"], rows=kind) for kind in QUANTIZED_ROWS},
    **{
        f"{name}-half-{kind}": replace(CASES["tree-aligned"], dtype=dtype, rows=kind)
        for name, dtype in (("brain", BF16), ("small", F16))
        for kind in QUANTIZED_ROWS
    },
    "slopes": replace(SLOPED_CASES["tree-of-64-half"], rows=INT8),
    "chunks": replace(CHUNKED_CASES["tree-half"], rows=FP8),
    "chunks-prefill": replace(CHUNKED_CASES["prefill"], rows=INT8),
    "sinks": replace(SINK_CASES["tree-odd-pages"], rows=FP8),
    "sinks-window": replace(SINK_CASES["tree-window-sink"], rows=INT8),
    "softcap": replace(SOFTCAP_CASES["tree-half"], rows=INT8),
    "softcap-sinks": replace(SOFTCAP_CASES["sinks-window"], rows=FP8),
    # as wide as what the tiles for floats take
    "wide": Case(((24, 150),), True, BF16, (4, 2), (128, 128), rows=INT8),
}  # fmt: skip
