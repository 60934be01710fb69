"""Threads of a pass: every unit of work once, barriers, errors, and the weights asked for ahead."""

from __future__ import annotations

import ctypes
import platform

import pytest

from specc.kernels import native
from tests.native_library import load_wrapper

# requests are recorded by the one thread that makes them in these tests
TEAM = """
#include <cstdint>
#include <vector>
static std::vector<const char*> asked;
#define __builtin_prefetch(p, write, level) asked.push_back(reinterpret_cast<const char*>(p))
#include "team.h"
#include <chrono>
#include <stdexcept>
#define EXPORT extern "C" __attribute__((visibility("default")))
using namespace specc;

// How often each of `units` was handed out; `slow`: a thread that sleeps at each.
EXPORT void share(int threads, int64_t units, int64_t most, int slow, int32_t* times,
                  int32_t* of_others) {
  Shares shares(threads);
  shares.deal(units, threads);
  std::vector<std::atomic<int>> counts(units);
  std::atomic<int> others{0};
#pragma omp parallel num_threads(threads)
  {
    const int thread = omp_get_thread_num();
    for (int64_t begin, end; shares.take(thread, most, begin, end);) {
      if (thread == slow) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      if (end - begin > most || begin >= end) others = -1000000;
      const int64_t own = Shares::begin_of(units, thread, threads);
      const int64_t own_end = Shares::begin_of(units, thread + 1, threads);
      for (int64_t i = begin; i < end; ++i) counts[i] += 1, others += i < own || i >= own_end;
    }
  }
  for (int64_t i = 0; i < units; ++i) times[i] = counts[i];
  *of_others = others;
}

// Sums of what threads see of each other after barriers, in `tasks` tasks; 0 is no fault.
EXPORT int64_t work(int threads, int tasks, int asked_for) {
  WeightOrder order;
  int64_t faults = 0;
  with_team(threads, order, [&] {
    for (int task = 0; task < tasks; ++task) {
      std::vector<int> seen(64, 0), sums(64, 0);
      int working = 0;
      const int most = 1 + (asked_for - 1) * (task % 3 > 0);
      in_parallel(most, [&](int thread, int count, const auto& barrier) {
        if (thread == 0) working = count;
        seen[thread] = 1;
        barrier();
        for (int other = 0; other < count; ++other) sums[thread] += seen[other];
        barrier();
        seen[thread] = 2;
        barrier();
        for (int other = 0; other < count; ++other) sums[thread] += seen[other];
      });
      const int expected = task % 3 > 0 ? std::min(asked_for, threads) : 1;
      faults += working != expected;
      for (int thread = 0; thread < working; ++thread) faults += sums[thread] != 3 * working;
    }
  });
  faults += team_of_pass != nullptr;
  return faults;
}

EXPORT int fail(int threads) {
  WeightOrder order;
  try {
    with_team(threads, order, [&] {
      in_parallel(threads, [](int, int, const auto&) {});
      throw std::runtime_error("expected");
    });
  } catch (const std::runtime_error& error) {
    return team_of_pass == nullptr && std::string(error.what()) == "expected";
  }
  return 0;
}

// `passes` over weights at given places by two threads; lines asked for in the last one. Of weight
// `changed`, all but the first pass have another.
EXPORT int64_t ask(int passes, const int64_t* places, int64_t count, int64_t blocks,
                   int64_t block_bytes, int64_t changed, int64_t* lines) {
  WeightOrder order;
  for (int pass = 0; pass < passes; ++pass) {
    asked.clear();
    with_team(2, order, [&] {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t place = places[i] + (pass > 0 && i == changed ? 1 << 30 : 0);
        const WeightBlocks weights{reinterpret_cast<const char*>(place), blocks, block_bytes};
        in_parallel(2, [](int, int, const auto&) {});
        std::atomic<int64_t> taken{0};
        team_of_pass->share(2, weights, [&](const auto& take) {
          for (int64_t begin, end; take(begin, end);) taken += end - begin;
        });
        if (taken != blocks) lines[0] = -1;
        // until nothing is asked for any more, on a busy machine, too
        for (size_t before = 0, looks = 0; looks < 4; ++looks) {
          std::this_thread::sleep_for(std::chrono::milliseconds(15));
          if (asked.size() != before) looks = 0;
          before = asked.size();
        }
      }
    });
  }
  for (size_t i = 0; i < asked.size(); ++i) lines[i] = reinterpret_cast<int64_t>(asked[i]);
  return asked.size();
}

EXPORT int64_t cache_bytes() { return sysconf(_SC_LEVEL2_CACHE_SIZE); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    openmp = native.openmp_flags()
    flags = ["-std=c++20", "-O2", "-fopenmp", "-fPIC"]
    found = load_wrapper(tmp_path_factory.mktemp("team"), TEAM, flags, (), tuple(openmp))
    for name in ("work", "ask", "cache_bytes"):
        getattr(found, name).restype = ctypes.c_int64
    return found


@pytest.mark.parametrize("slow", [-1, 0, 1])
@pytest.mark.parametrize(
    ("threads", "units", "most"),
    [(1, 7, 3), (2, 40, 1), (2, 41, 4), (3, 2, 1), (3, 100, 7), (4, 0, 2), (2, 5, 100)],
)
def test_each_unit_is_handed_out_once(library, threads, units, most, slow):
    times = (ctypes.c_int32 * max(units, 1))()
    others = ctypes.c_int32()
    library.share(
        threads, ctypes.c_int64(units), ctypes.c_int64(most), slow, times, ctypes.byref(others)
    )
    assert list(times)[:units] == [1] * units
    assert others.value >= 0
    if threads == 2 and units == 40 and slow >= 0:
        # the other one has nearly all
        assert others.value >= 15


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("asked_for", [2, 4])
def test_threads_wait_for_each_other(library, threads, asked_for):
    """In tasks of one, of some and of all threads, on fewer processors, too."""
    # of more threads than processors each waits until it has one
    assert library.work(threads, 3000 if threads <= 2 else 200, asked_for) == 0


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_an_error_ends_the_team(library, threads):
    assert library.fail(threads) == 1
    assert library.work(threads, 3, 2) == 0


def asked_lines(library, places, blocks, block_bytes, changed=-1, passes=2) -> list[int]:
    lines = (ctypes.c_int64 * 1_000_000)()
    found = library.ask(
        passes, (ctypes.c_int64 * len(places))(*places), ctypes.c_int64(len(places)),
        ctypes.c_int64(blocks), ctypes.c_int64(block_bytes), ctypes.c_int64(changed), lines,
    )  # fmt: skip
    return list(lines[:found])


def test_the_next_product_s_weights_are_asked_for(library):
    """Those of the thread that waits: the second half of the blocks, each line once, in order."""
    places = [1 << 20, 3 << 20, 2 << 20]
    lines = asked_lines(library, places, blocks=5, block_bytes=4096)
    own = [place + i for place in (3 << 20, 2 << 20) for i in range(2 * 4096, 5 * 4096, 64)]
    assert lines == own


def test_a_pass_that_reads_other_weights_is_learned(library):
    """Until then what the pass before had is asked for: nothing depends on its being there."""
    places = [1 << 20, 3 << 20, 2 << 20]

    def halves(*found: int) -> list[int]:
        return [place + i for place in found for i in range(4096, 8192, 64)]

    lines = asked_lines(library, places, 2, 4096, changed=1)
    assert lines == halves(*places[1:])
    lines = asked_lines(library, places, 2, 4096, changed=1, passes=3)
    assert lines == halves(places[1] + (1 << 30), places[2])


@pytest.mark.skipif(platform.system() != "Linux", reason="asks Linux for the size of a cache")
def test_no_more_is_asked_for_than_half_the_cache(library):
    size = library.cache_bytes()
    most = (size if size > 0 else 1 << 19) // 2
    lines = asked_lines(library, [1 << 30, 2 << 30], blocks=2, block_bytes=4 * most)
    assert len(lines) == most // 64
    assert lines[0] == (2 << 30) + 4 * most
