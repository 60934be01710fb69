"""Requests for the next tile of attention: every line once, spread evenly over the work."""

from __future__ import annotations

import ctypes

import pytest

from specc.system.cxx_compiler import find_compiler
from tests.kernel_flags import SOURCE_DIR, run_compiler

# a request is recorded; the headers before it use the builtin no further
RECORDER = """
#include <cstdint>
#include <vector>
static std::vector<const char*> asked;
#define __builtin_prefetch(p, write, level) asked.push_back(reinterpret_cast<const char*>(p))
"""
AHEAD = f"""{RECORDER}
#include "tree_attention_ahead.h"
using namespace specc::attention;
// Places of the lines asked for after `spends` steps of `step` units, then after finish.
extern "C" int64_t ask(const char** rows, int64_t count, int64_t key_bytes, int64_t value_bytes,
                       int64_t work, int64_t step, int64_t spends, const char** lines,
                       int64_t* before_finish) {{
  asked.clear();
  Ahead ahead(rows, count, key_bytes, value_bytes, work);
  for (int64_t i = 0; i < spends; ++i) ahead.spend(step);
  *before_finish = asked.size();
  ahead.finish();
  for (size_t i = 0; i < asked.size(); ++i) lines[i] = asked[i];
  return asked.size();
}}
"""
TILES = f"""
#include <immintrin.h>
{RECORDER}
#include "kv_rows.cpp"
#include "tree_attention_softmax.h"
#include "tree_attention_tile.h"
#include "int8_tile.h"
using namespace specc::attention;
#ifdef SPECC_HAS_BYTE_PRODUCTS
using Int8Tile = ByteTile;
#else
using Int8Tile = FloatTile<float>;
#endif
// Requests, of 128, that a tile of `rows` makes where twice its work is expected.
template <class Tile, class Q>
int64_t requests(int64_t rows, int64_t dim) {{
  using S = typename Tile::Stored;
  Tile tile({{dim, dim, rows, rows}});
  std::vector<float> memory(tile.scratch() + 16), scores(rows * kTile);
  float* p = memory.data();
  while (reinterpret_cast<uintptr_t>(p) % 64) ++p;
  tile.bind(p);
  std::vector<S> row(2 * dim + 64);
  std::vector<Q> query(dim);
  std::vector<float> sums(rows * Tile::width(dim));
  std::vector<const Q*> queries(rows, query.data());
  const S* keys[kTile];
  const char* next[2 * kTile];
  for (auto& key : keys) key = row.data();
  for (auto& one : next) one = reinterpret_cast<const char*>(row.data());
  tile.load_queries(0, queries.data(), rows);
  asked.clear();
  Ahead ahead(next, kTile, 1, 1, 2 * tile.work(rows, kTile));
  tile.score(0, rows, keys, kTile, scores.data(), ahead);
  for (int64_t r = 0; r < rows; ++r) ahead.spend(kSoftmaxWork);
  tile.add({{scores.data(), keys, kTile}}, rows, sums.data(), ahead);
  return asked.size() / 2;
}}
extern "C" int64_t requests_of_floats(int64_t rows, int64_t dim) {{
  return requests<FloatTile<float>, float>(rows, dim);
}}
extern "C" int64_t requests_of_bfloat16(int64_t rows, int64_t dim) {{
  return requests<FloatTile<specc::vec::BFloat16>, specc::vec::BFloat16>(rows, dim);
}}
extern "C" int64_t requests_of_int8(int64_t rows, int64_t dim) {{
  return requests<Int8Tile, float>(rows, dim);
}}
"""


def compiled(source: str, folder, *flags: str) -> ctypes.CDLL:
    path, out = folder / "wrapper.cpp", folder / "wrapper.so"
    path.write_text(source, encoding="utf-8")
    include = ["-I", str(SOURCE_DIR)]
    command = [find_compiler(), "-std=c++20", "-shared", "-fPIC", *flags, *include]
    run_compiler([*command, str(path), "-o", str(out)])
    return ctypes.CDLL(str(out))


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    library = compiled(AHEAD, tmp_path_factory.mktemp("ahead"))
    library.ask.restype = ctypes.c_int64

    def call(count: int, key: int, value: int, work: int, step: int, spends: int):
        rows = (ctypes.c_void_p * (2 * count))(*(10_000 * (i + 1) for i in range(2 * count)))
        lines = (ctypes.c_void_p * 100_000)()
        before = ctypes.c_int64()
        numbers = [ctypes.c_int64(x) for x in (count, key, value, work, step, spends)]
        found = library.ask(rows, *numbers, lines, ctypes.byref(before))
        return list(lines[:found]), before.value

    return call


@pytest.mark.parametrize(("key", "value"), [(256, 128), (68, 132), (128, 512)])
@pytest.mark.parametrize("step", [1, 7, 5000])
def test_every_line_is_asked_for_once(ask, key, value, step):
    lines, _ = ask(64, key, value, 1000, step, 1000 // step)
    assert len(lines) == len(set(lines))
    for i in range(128):
        size, row = key if i < 64 else value, 10_000 * (i + 1)
        # the last line of a row may be asked for with one after it
        wanted = {row + at for at in range(0, size, 64)}
        assert (
            wanted <= {x for x in lines if row <= x < row + 10_000} <= wanted | {max(wanted) + 64}
        )


@pytest.mark.parametrize("count", [1, 5, 64])
def test_requests_are_spread_over_the_work(ask, count):
    for done in range(0, 1001, 50):
        _, before = ask(count, 128, 128, 128_000, 128, done)
        assert before / 2 == pytest.approx(2 * count * done / 1000, abs=1)


def test_nothing_is_asked_for_after_the_last_tile(ask):
    assert ask(0, 128, 128, 1000, 10, 100) == ([], 0)


@pytest.mark.slow
def test_tiles_say_how_much_they_work(tmp_path):
    """Half of what is asked for over twice the work, so neither early nor in a burst at the end."""
    library = compiled(TILES, tmp_path, "-march=native", "-O1", "-fopenmp")
    for kind in ("floats", "bfloat16", "int8"):
        for rows in (1, 2, 5, 12, 13, 40):
            for dim in (64, 128):
                found = getattr(library, f"requests_of_{kind}")(
                    ctypes.c_int64(rows), ctypes.c_int64(dim)
                )
                assert 56 <= found <= 66, (kind, rows, dim)
