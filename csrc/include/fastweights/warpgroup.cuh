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

// d ← p·a + q·d.
template <typename T>
__device__ __forceinline__ void blend(const Left& a, float p, float q, Accumulator& d) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low, high;
      unpack<T>(a.x[step][i], low, high);
      float& low_sum = d.x[8 * step + 2 * i];
      float& high_sum = d.x[8 * step + 2 * i + 1];
      low_sum = p * low + q * low_sum;
      high_sum = p * high + q * high_sum;
    }
  }
}

// x added to the diagonal of d.
__device__ __forceinline__ void add_to_diagonal(Accumulator& d, float x, int warp, int lane) {
  const bool even = lane / 8 == lane % 4 && lane / 4 % 2 == 0;
  const bool odd = lane / 8 == lane % 4 && lane / 4 % 2 == 1;
  const float to_even = even ? x : 0.0f, to_odd = odd ? x : 0.0f;
#pragma unroll
  for (int w = 0; w < 4; ++w) {  // columns 16w on meet the rows of warp w
    if (warp == w) {
      d.x[8 * w] += to_even;
      d.x[8 * w + 1] += to_odd;
      d.x[8 * w + 6] += to_even;
      d.x[8 * w + 7] += to_odd;
    }
  }
}

// a ← p·a + q·d, by way of d.
template <typename T>
__device__ __forceinline__ void mix(Left& a, float p, float q, Accumulator& d) {
  blend<T>(a, p, q, d);
  round_to_left<T>(d, a);
}

// d ← p·a.
template <typename T>
__device__ __forceinline__ void widen(const Left& a, float p, Accumulator& d) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low, high;
      unpack<T>(a.x[step][i], low, high);
      d.x[8 * step + 2 * i] = p * low;
      d.x[8 * step + 2 * i + 1] = p * high;
    }
  }
}

// Address in a tile at which this thread's part of step `step` of a left operand starts, for
// load_matrices and store_matrices: as its own rows, or (kTransposed) as columns of the tile.
template <bool kTransposed>
__device__ __forceinline__ u32 left_address(u32 tile, int step, int warp, int lane) {
  const int matrix = lane / 8;
  const int down = 16 * warp + 8 * (matrix % 2);   // rows of the operand
  const int along = 16 * step + 8 * (matrix / 2);  // its columns
  if constexpr (kTransposed) {
    return tile + Tile::piece(along + lane % 8, down / 8);
  }
  return tile + Tile::piece(down + lane % 8, along / 8);
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
