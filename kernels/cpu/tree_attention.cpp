// specc::tree_attention on a CPU: flash attention over tiles of 64 keys.
//
// An item is one sequence's block of query rows: the queries of some tokens, all heads of one KV
// head packed together, so that a tile of K and V is read once for all of them. Per tile, keys
// are transposed into a panel, scores are a small matrix product, each token's visible keys are
// one 64-bit word, and the softmax is computed online (arXiv:2205.14135). All tiles of all items
// form one line, which threads cut into shares of about equal cost; partial results of an item that
// was cut are merged (arXiv:2311.01282), whatever the lengths of the batch.
//
// The rows of all KV heads of a token lie side by side, and a tile is used for one head after the
// other before the next tile is touched: head by head over a long cache, every row would be a page
// of its own, looked up and opened again for each head. What comes next is asked for a tile ahead,
// into the second-level cache: the first one is too small for it, and so are its miss buffers.
//
// A row's bits do not depend on the rows beside it, the heads of a unit, where blocks lie, or the
// number of threads: a node of a tree has the bits of plain decoding of its path. For that, tiles
// are those of plain decoding (tree_attention_view.h), and every kPieceTiles of them have sums of
// their own, which are added in order whoever has which.
//
// Rows of the cache that no token of an item sees may hold NaN: they are replaced by a row of
// zeros before any arithmetic.

// before any header: the compiler may reorder the sums of each instantiation below differently
#if defined(__clang__)
#pragma clang fp reassociate(off)
#elif defined(__GNUC__)
#pragma GCC optimize("no-associative-math")
#endif

#include "kernels.h"
#include "tree_attention_int8.h"
#include "tree_attention_worker.h"

namespace specc {

void tree_attention(const TreeAttention& a, int num_threads) {
  using namespace attention;
  if (a.holds_int8)
    tree_attention_int8(a, num_threads);
  else if (a.dtype == DType::kFloat32)
    run<float, FloatTile<float>>(a, num_threads);
  else
    run<BFloat16, FloatTile<BFloat16>>(a, num_threads);
}

}  // namespace specc
