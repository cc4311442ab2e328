// Matrices of 64 × 64 in tiles, multiplied and stored by what sm_80 has: mma.sync, ldmatrix, plain
// stores. Four warps hold accumulators and left operands as a warpgroup does.
#pragma once

#include <fastweights/mma.cuh>
#include <fastweights/warpgroup.cuh>

namespace fastweights {

// d += a·b over 64 k, this warp's 16 rows; b is a tile in shared memory. One load gives 16 k of 16
// columns, the eight addresses of which lie in all banks, along rows and across.
template <typename T, Major kB>
__device__ __forceinline__ void multiply_add(Accumulator& d, const Left& a, u32 b, int lane) {
  const int matrix = lane / 8;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      u32 right[4];
      if constexpr (kB == Major::kAlongK) {
        const int row = 16 * pair + 8 * (matrix / 2) + lane % 8;
        load_matrices<false>(b + Tile::piece(row, 2 * step + matrix % 2), right);
      } else {
        const int row = 16 * step + 8 * (matrix % 2) + lane % 8;
        load_matrices<true>(b + Tile::piece(row, 2 * pair + matrix / 2), right);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        mma_step(T{}, reinterpret_cast<float (&)[4]>(d.x[8 * pair + 4 * j]), a.x[step],
                 right[2 * j], right[2 * j + 1]);
      }
    }
  }
}

// store_left without stmatrix.
template <bool kTransposed>
__device__ __forceinline__ void store_left_words(u32 tile, const Left& a, int warp, int lane) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int down = 16 * warp + 8 * (i % 2);   // rows of the operand
      const int along = 16 * step + 8 * (i / 2);  // its columns
      if constexpr (kTransposed) {
        store_shared(tile + Tile::piece(along + lane / 4, down / 8) + 4 * (lane % 4),
                     transpose(a.x[step][i]));
      } else {
        store_shared(tile + Tile::piece(down + lane / 4, along / 8) + 4 * (lane % 4), a.x[step][i]);
      }
    }
  }
}

}  // namespace fastweights
