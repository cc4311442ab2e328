// The products of Newton–Schulz over a matrix of a stack, on Hopper: a group is a warpgroup. Left
// operands are in registers, right ones in tiles; a product leaves its left operand for the next
// one in the registers that hold it.
#pragma once

#include <fastweights/wgmma.cuh>

#include "stack.cuh"

namespace fastweights {

template <int kRowTiles, int kColTiles, bool kTall, int kGroups = kRowTiles>
struct Stack : StackTiles<kRowTiles, kColTiles, kTall, kGroups> {
  using Base = StackTiles<kRowTiles, kColTiles, kTall, kGroups>;
  using Base::gram_tile, Base::tile, Base::own_tile, Base::kGram, Base::kUpdate, Base::kOwn;
  using Base::group, Base::lane, Base::warp, Base::keep, Base::recall;
  using typename Base::Compute, typename Base::Gram;

  // What this thread stored becomes an operand for all.
  __device__ __forceinline__ static void publish() {
    fence_async();
    __syncthreads();
  }

  // x·yᵀ over the columns, this warpgroup's rows.
  __device__ __forceinline__ void product(u32 x, u32 y, Gram& rows) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      Accumulator sum[1];
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < kColTiles; ++k) {
        multiply<Compute, kGram, kGram>(sum[0], tile(TileName(x), group, k),
                                        tile(TileName(y), r, k), k > 0);
      }
      wgmma_commit();
      wgmma_wait<0>(sum);
      round_to_left<Compute>(sum[0], rows[r]);
    }
  }

  __device__ __forceinline__ void store(u32 a, const Gram& rows) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      store_left<false>(gram_tile(a, group, r), rows[r], warp, lane);
    }
  }

  // Column tile r of left·right, right a rows × rows matrix in tiles.
  __device__ __forceinline__ void square_product(const Gram& left, u32 right, int r,
                                                 Accumulator (&sum)[1]) const {
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kRowTiles; ++k) {
      multiply<Compute, Major::kAcross>(sum[0], left[k], gram_tile(TileName(right), k, r), k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>(sum);
  }

  // b·A + c·A², with A in registers and in tiles.
  __device__ __forceinline__ void polynomial(const Gram& gram, u32 a, float b, float c,
                                             Gram& out) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      Accumulator sum[1];
      square_product(gram, a, r, sum);
      out[r] = gram[r];
      mix<Compute>(out[r], b, c, sum[0]);
    }
  }

  // Start out += left·(column tile k of x).
  __device__ __forceinline__ void apply(const Gram& left, u32 x, int k, Accumulator& out) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      multiply<Compute, kUpdate>(out, left[r], tile(TileName(x), r, k), true);
    }
  }

  // Such a tile to its place in X.
  __device__ __forceinline__ void put(u32 x, int index, const Left& rows) const {
    store_left<kTall>(own_tile(x, index), rows, warp, lane);
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
