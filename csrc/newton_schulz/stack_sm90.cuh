// The products of Newton–Schulz over a matrix of a stack, on Hopper: a group is a warpgroup. Left
// operands are in registers, right ones in tiles; a product leaves its left operand for the next
// one in the registers that hold it.
#pragma once

#include <fastweights/wgmma.cuh>

#include "stack.cuh"

namespace fastweights {

// kInFlight: sums whose products run at once.
template <int kRowTiles, int kColTiles, bool kTall, int kInFlight = 2, int kGroups = kRowTiles>
struct Stack : StackTiles<kRowTiles, kColTiles, kTall, kGroups> {
  using Base = StackTiles<kRowTiles, kColTiles, kTall, kGroups>;
  using Base::gram_tile, Base::tile, Base::own_tile, Base::kGram, Base::kUpdate, Base::kOwn;
  using Base::group, Base::lane, Base::warp, Base::keep, Base::recall;
  using typename Base::Compute, typename Base::Gram;
  using Own = Left[kColTiles];                                  // a group's rows of X
  static constexpr bool kCarried = kRowTiles * kColTiles == 1;  // they stay in registers

  Diagonal diagonal{lane};

  __device__ __forceinline__ static void sync() { sync_anywhere<Base::kThreads>(1); }
  // What this thread stored becomes an operand for all.
  __device__ __forceinline__ static void publish() {
    fence_async();
    sync();
  }

  // This group's rows of X, into registers.
  __device__ __forceinline__ void own(u32 x, Own& rows) const {
#pragma unroll
    for (int k = 0; k < kColTiles; ++k) {
      load_left<kTall>(tile(x, group, k), rows[k], warp, lane);
    }
  }

  // kCount sums, of products that start(i, sum) starts, to finish(i, sum). While one is finished
  // the products of the next run.
  template <int kCount, typename Start, typename Finish>
  __device__ __forceinline__ static void sums(Start&& start, Finish&& finish) {
    constexpr int kSums = kCount < kInFlight ? kCount : kInFlight;
    Accumulator sum[kSums];
    auto begin = [&](int i) {
      wgmma_begin();
      start(i, sum[i % kSums]);
      wgmma_commit();
    };
#pragma unroll
    for (int i = 0; i < kSums - 1; ++i) {
      begin(i);
    }
    repeat<kCount>([&](auto i_) {
      constexpr int i = decltype(i_)::value, kLast = i + kSums - 1;
      if constexpr (kLast < kCount) {
        begin(kLast);
      }
      wgmma_wait<(kLast < kCount ? kSums : kCount - i) - 1>(sum[i % kSums]);
      finish(i, sum[i % kSums]);
    });
  }

  // This group's rows of x·yᵀ, in registers and in tiles.
  __device__ __forceinline__ void product(const Own& x, u32 y, Gram& rows, u32 tiles) const {
    sums<kRowTiles>(
        [&](int r, Accumulator& sum) {
#pragma unroll
          for (int k = 0; k < kColTiles; ++k) {
            multiply<Compute, kGram>(sum, x[k], tile(TileName(y), r, k), k > 0);
          }
        },
        [&](int r, const Accumulator& sum) {
          round_to_left<Compute>(sum, rows[r]);
          store_left<false>(gram_tile(tiles, group, r), rows[r], warp, lane);
        });
  }
  __device__ __forceinline__ void store(u32 a, const Gram& rows) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      store_left<false>(gram_tile(a, group, r), rows[r], warp, lane);
    }
  }

  // left·right, right a rows × rows matrix in tiles, by column r of tiles to finish(r, sum).
  template <typename Finish>
  __device__ __forceinline__ static void square_product(const Gram& left, u32 right,
                                                        Finish&& finish) {
    sums<kRowTiles>(
        [&](int r, Accumulator& sum) {
#pragma unroll
          for (int k = 0; k < kRowTiles; ++k) {
            multiply<Compute, Major::kAcross>(sum, left[k], gram_tile(TileName(right), k, r),
                                              k > 0);
          }
        },
        finish);
  }

  // a·I + b·A + c·A², with A in registers and in tiles: all that multiplies X, so that a·X need not
  // be formed and added. Rounded once, it errs less than b·A + c·A² and a·X do.
  __device__ __forceinline__ void polynomial(const float (&f)[3], const Gram& gram, u32 a,
                                             Gram& out) const {
    square_product(gram, a, [&](int r, Accumulator& sum) {
      round_polynomial<Compute>(f, gram[r], sum, kRowTiles == 1 || r == group, diagonal, warp,
                                out[r]);
    });
  }

  // Start out (+)= left·(column tile k of x).
  template <bool kAdd>
  __device__ __forceinline__ void apply(const Gram& left, u32 x, int k, Accumulator& out) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      multiply<Compute, kUpdate>(out, left[r], tile(TileName(x), r, k), kAdd || r > 0);
    }
  }

  // The same over column tiles of X.
  template <typename Start, typename Finish>
  __device__ __forceinline__ static void columns(Start&& start, Finish&& finish) {
    sums<kColTiles>(start, finish);
  }

  // The index-th tile that this group owns to its place in X, and all that registers hold.
  __device__ __forceinline__ void put(u32 x, int index, const Left& rows) const {
    store_left<kTall>(own_tile(x, index), rows, warp, lane);
  }
  __device__ __forceinline__ void put(u32 x, const Own& rows) const {
#pragma unroll
    for (int k = 0; k < kColTiles; ++k) {
      put(x, k, rows[k]);
    }
  }

  // All of them, out of X and back.
  __device__ __forceinline__ void keep(u32 x, uint4* kept) const {
#pragma unroll 2
    for (int i = 0; i < kOwn * kColTiles; ++i) {
      Left rows;
      load_left<kTall>(own_tile(x, i), rows, warp, lane);
      keep(kept, i, rows);
    }
  }
  __device__ __forceinline__ void recall(u32 x, const uint4* kept) const {
    Left rows[kColTiles];
#pragma unroll 1
    for (int first = 0; first < kOwn * kColTiles; first += kColTiles) {
#pragma unroll
      for (int i = 0; i < kColTiles; ++i) {
        recall(kept, first + i, rows[i]);
      }
#pragma unroll
      for (int i = 0; i < kColTiles; ++i) {
        put(x, first + i, rows[i]);
      }
    }
  }
};

}  // namespace fastweights
