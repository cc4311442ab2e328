// The products of Newton–Schulz over a matrix of a stack, on Hopper: a warpgroup owns a row of
// tiles. Left operands are in registers, right ones in tiles; a product leaves its left operand for
// the next one in the registers that hold it.
#pragma once

#include <fastweights/wgmma.cuh>

#include "stack.cuh"

namespace fastweights {

template <int kRowTiles, int kColTiles, bool kTall>
struct Stack : StackTiles<kRowTiles, kColTiles, kTall> {
  using Base = StackTiles<kRowTiles, kColTiles, kTall>;
  using Base::gram_tile, Base::tile, Base::kGram, Base::kUpdate;
  using Base::group, Base::lane, Base::warp;
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
        multiply<Compute, kGram, kGram>(sum[0], tile(x, group, k), tile(y, r, k), k > 0);
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
      multiply<Compute, Major::kAcross>(sum[0], left[k], gram_tile(right, k, r), k > 0);
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
      multiply<Compute, kUpdate>(out, left[r], tile(x, r, k), true);
    }
  }

  __device__ __forceinline__ void store(u32 x, int k, const Left& rows) const {
    store_left<kTall>(tile(x, group, k), rows, warp, lane);
  }
};

}  // namespace fastweights
