// Newton–Schulz on stacks of matrices up to 32 × 32, a warp each, in registers from load to store.
//
// X, A and B are left operands of mma.sync. A and B are symmetric, so their registers are right
// operands as they are; X as a right operand is X transposed by eights, once a step.
//
// Columns stand in any order that all of X agrees on: a thread takes neighbours of each row, in one
// load, and calls them what the product wants them called.
#pragma once

#include <fastweights/mma.cuh>

#include "common.cuh"

namespace fastweights {

// 16·kTiles × 16·kTiles numbers as left operands: [row tile][step of 16 columns][register].
template <int kTiles>
struct Fragments {
  u32 x[kTiles][kTiles][4];
};

// d (+)= a·bᵀ, as accumulators [row tile][block of 8 columns][4].
template <int kTiles>
using Sums = float[kTiles][2 * kTiles][4];

template <int kTiles, typename T>
__device__ __forceinline__ void multiply_transposed(Sums<kTiles>& d, const Fragments<kTiles>& a,
                                                    const Fragments<kTiles>& b) {
#pragma unroll
  for (int k = 0; k < kTiles; ++k) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kTiles; ++j) {
        mma_step(T{}, d[i][j], a.x[i][k], b.x[j / 2][k][j % 2], b.x[j / 2][k][2 + j % 2]);
      }
    }
  }
}

template <int kTiles, typename T>
__device__ __forceinline__ void round_sums(const Sums<kTiles>& d, Fragments<kTiles>& a) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float (&from)[4] = d[i][2 * k + r / 2];
        a.x[i][k][r] = pack<T>(from[2 * (r % 2)], from[2 * (r % 2) + 1]);
      }
    }
  }
}

// sums = factor·x, or 0 without x.
template <int kTiles>
__device__ __forceinline__ void set(Sums<kTiles>& sums, const Fragments<kTiles>* x, float factor) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float low = 0.0f, high = 0.0f;
        if (x != nullptr) {
          unpack<half>(x->x[i][k][r], low, high);
        }
        sums[i][2 * k + r / 2][2 * (r % 2)] = factor * low;
        sums[i][2 * k + r / 2][2 * (r % 2) + 1] = factor * high;
      }
    }
  }
}

// x, y: `count` contiguous matrices of rows × cols, both ≤ 16·kTiles.
template <int kTiles, typename T>
__global__ void __launch_bounds__(128)
    newton_schulz_small(const T* __restrict__ x, T* __restrict__ y, long long count, int rows,
                        int cols, int steps, float eps, int whole_pieces,
                        const __grid_constant__ Coefficients coefficients) {
  using Compute = half;
  constexpr int kWords = 2 * kTiles;  // of a thread and row: 4·kTiles neighbours
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int col = 4 * kTiles * t;

  for (long long n = (long long)blockIdx.x * warps + warp; n < count;
       n += (long long)gridDim.x * warps) {
    const T* source = x + n * rows * cols;
    Fragments<kTiles> matrix;
    float square = 0.0f;
#pragma unroll
    for (int r = 0; r < 2 * kTiles; ++r) {
      u32 words[kWords];
      load_words<kWords>(source, 8 * r + g, col, rows, cols, whole_pieces, words);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        float low, high;
        unpack<T>(words[w], low, high);
        square += low * low + high * high;
        matrix.x[r / 2][w / 2][r % 2 + 2 * (w % 2)] = words[w];
      }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      square += __shfl_xor_sync(0xffffffffu, square, offset);
    }
    const float scale = 1.0f / (sqrtf(square) + eps);
    Sums<kTiles> sums;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int k = 0; k < kTiles; ++k) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          float low, high;
          unpack<T>(matrix.x[i][k][r], low, high);
          matrix.x[i][k][r] = pack<Compute>(low * scale, high * scale);
        }
      }
    }

    for (int step = 0; step < steps; ++step) {
      const float a = coefficients.of_step[step][0];
      const float b = coefficients.of_step[step][1];
      const float c = coefficients.of_step[step][2];
      Fragments<kTiles> gram, polynomial, across;
      set<kTiles>(sums, nullptr, 0.0f);
      multiply_transposed<kTiles, Compute>(sums, matrix, matrix);
      round_sums<kTiles, Compute>(sums, gram);
      set<kTiles>(sums, nullptr, 0.0f);
      multiply_transposed<kTiles, Compute>(sums, gram, gram);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int k = 0; k < kTiles; ++k) {
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            float low, high;
            unpack<Compute>(gram.x[i][k][r], low, high);
            const float (&squared)[4] = sums[i][2 * k + r / 2];
            polynomial.x[i][k][r] = pack<Compute>(b * low + c * squared[2 * (r % 2)],
                                                  b * high + c * squared[2 * (r % 2) + 1]);
            // Block (i, k) of eights, transposed, is block (k, i) of Xᵀ.
            across.x[k][i][r / 2 + 2 * (r % 2)] = transpose(matrix.x[i][k][r]);
          }
        }
      }
      set<kTiles>(sums, &matrix, a);
      multiply_transposed<kTiles, Compute>(sums, polynomial, across);
      if (step + 1 == steps) {
        round_sums<kTiles, T>(sums, matrix);
      } else {
        round_sums<kTiles, Compute>(sums, matrix);
      }
    }

    T* target = y + n * rows * cols;
#pragma unroll
    for (int r = 0; r < 2 * kTiles; ++r) {
      u32 words[kWords];
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        words[w] = matrix.x[r / 2][w / 2][r % 2 + 2 * (w % 2)];
      }
      store_words<kWords>(target, 8 * r + g, col, rows, cols, whole_pieces, words);
    }
  }
}

}  // namespace fastweights
