// Matrices of 64 × 64 as a warpgroup of four warps holds them, and as tiles in shared memory.
#pragma once

#include <fastweights/shared.cuh>

namespace fastweights {

// How the 16-bit operand lies in its tile, seen from the product: rows of the tile run along k, so
// that the tile is [rows, k] (kAlongK), or the rows of the tile are the k (kAcross).
enum class Major { kAlongK = 0, kAcross = 1 };

// The accumulator of one warpgroup, 64 × 64 in fp32. Of each thread, block j of four numbers holds
// columns 8j + 2·(lane % 4) and the next one, of rows 16·warp + lane / 4 and eight below.
struct Accumulator {
  float x[32];
};

// The left operand in registers, 64 × 64 16-bit numbers: of each thread, step s holds what
// 16 columns from 16s on need.
struct Left {
  u32 x[4][4];
};

// An accumulator rounded to 16 bits is the left operand of the next product, in place.
template <typename T>
__device__ __forceinline__ void round_to_left(const Accumulator& d, Left& a) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a.x[step][i] = pack<T>(d.x[8 * step + 2 * i], d.x[8 * step + 2 * i + 1]);
    }
  }
}

// d ← p·a + q·d; q is 1 more often than not.
template <typename T>
__device__ __forceinline__ void blend(const Left& a, float p, float q, Accumulator& d) {
  if (q != 1.0f) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      d.x[i] *= q;
    }
  }
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low, high;
      unpack<T>(a.x[step][i], low, high);
      d.x[8 * step + 2 * i] += p * low;
      d.x[8 * step + 2 * i + 1] += p * high;
    }
  }
}

// Which numbers of this thread lie on the diagonal: of the two neighbours that it holds in each
// block on it, the first, the second or none.
struct Diagonal {
  float first, second;

  __device__ __forceinline__ explicit Diagonal(int lane)
      : first(lane / 4 == 2 * (lane % 4)), second(lane / 4 == 2 * (lane % 4) + 1) {
    stay(first);
    stay(second);
  }

  // d ← d + x·I.
  __device__ __forceinline__ void add(Accumulator& d, float x, int warp) const {
#pragma unroll
    for (int w = 0; w < 4; ++w) {  // columns 16w on meet the rows of warp w
      if (warp == w) {
        d.x[8 * w] += first * x;
        d.x[8 * w + 1] += second * x;
        d.x[8 * w + 6] += first * x;
        d.x[8 * w + 7] += second * x;
      }
    }
  }
};

// Where in a tile this thread's part of step `step` of a left operand starts, for load_matrices and
// store_matrices: as its own rows, or (kTransposed) as columns of the tile.
template <bool kTransposed>
__device__ __forceinline__ u32 left_address(u32 tile, int step, int warp, int lane) {
  const int matrix = lane / 8;
  const int down = 2 * warp + matrix % 2;  // of the operand, in eights: its rows
  const int along = matrix / 2;            // and its columns, of step 0
  if constexpr (kTransposed) {
    return tile + Tile::piece(8 * along + lane % 8, down) + step * Tile::piece(16, 0);
  }
  // Steps are two pieces apart, which the swizzle leaves them.
  return (tile + Tile::piece(8 * down + lane % 8, along)) ^ (step << 5);
}

template <bool kTransposed>
__device__ __forceinline__ void store_left(u32 tile, const Left& a, int warp, int lane) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    store_matrices<kTransposed>(left_address<kTransposed>(tile, step, warp, lane), a.x[step]);
  }
}

template <bool kTransposed>
__device__ __forceinline__ void load_left(u32 tile, Left& a, int warp, int lane) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    load_matrices<kTransposed>(left_address<kTransposed>(tile, step, warp, lane), a.x[step]);
  }
}

}  // namespace fastweights
