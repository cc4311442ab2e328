// Newton–Schulz on stacks of matrices up to 32 × 32, a warp each, in registers from load to store.
//
// X, A and B are left operands of mma.sync. A and B are symmetric, so their registers are right
// operands as they are; X as a right operand is X transposed by eights, once a step.
//
// Columns stand in any order that all of X agrees on: a thread takes neighbours of each row, in one
// load, and calls them what the product wants them called.
#pragma once

#include <fastweights/mma.cuh>
#include <fastweights/shared.cuh>

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

// sums = factor·x.
template <int kTiles>
__device__ __forceinline__ void set(Sums<kTiles>& sums, const Fragments<kTiles>& x, float factor) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float low, high;
        unpack<half>(x.x[i][k][r], low, high);
        sums[i][2 * k + r / 2][2 * (r % 2)] = factor * low;
        sums[i][2 * k + r / 2][2 * (r % 2) + 1] = factor * high;
      }
    }
  }
}

// out = p·x + q·sums; out may be x.
template <int kTiles>
__device__ __forceinline__ void mix(Fragments<kTiles>& out, float p, const Fragments<kTiles>& x,
                                    float q, const Sums<kTiles>& sums) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float low, high;
        unpack<half>(x.x[i][k][r], low, high);
        const float (&from)[4] = sums[i][2 * k + r / 2];
        out.x[i][k][r] =
            pack<half>(p * low + q * from[2 * (r % 2)], p * high + q * from[2 * (r % 2) + 1]);
      }
    }
  }
}

// sums += a·x.
template <int kTiles>
__device__ __forceinline__ void multiply(Sums<kTiles>& sums, const Fragments<kTiles>& a,
                                         const Fragments<kTiles>& x) {
  Fragments<kTiles> across;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        // Block (i, k) of eights, transposed, is block (k, i) of Xᵀ.
        across.x[k][i][r / 2 + 2 * (r % 2)] = transpose(x.x[i][k][r]);
      }
    }
  }
  multiply_transposed<kTiles, half>(sums, a, across);
}

// A = X·Xᵀ and B = b·A + c·A².
template <int kTiles>
__device__ __forceinline__ void gram_polynomial(const Fragments<kTiles>& x, float b, float c,
                                                Fragments<kTiles>& gram,
                                                Fragments<kTiles>& polynomial) {
  Sums<kTiles> sums = {};
  multiply_transposed<kTiles, half>(sums, x, x);
  round_sums<kTiles, half>(sums, gram);
  Sums<kTiles> squared = {};
  multiply_transposed<kTiles, half>(squared, gram, gram);
  mix(polynomial, b, gram, c, squared);
}

// sums = the next iterate.
template <int kTiles>
__device__ __forceinline__ void small_step(const Fragments<kTiles>& x, const float (&f)[3],
                                           Sums<kTiles>& sums) {
  Fragments<kTiles> gram, polynomial;
  gram_polynomial(x, f[1], f[2], gram, polynomial);
  set(sums, x, f[0]);
  multiply(sums, polynomial, x);
}

template <typename F>
__device__ __forceinline__ float warp_reduce(float x, F&& f) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x = f(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
  return warp_reduce(x, [](float a, float b) { return a + b; });
}

// The matrix at `source` times scale/(its norm + eps) (0, if that norm is), and its norm. kAnySize:
// its square need not be a number that fp32 has.
template <bool kAnySize, int kTiles, typename T>
__device__ __forceinline__ float load_scaled(Fragments<kTiles>& x, const T* source, int rows,
                                             int cols, bool whole, float scale, float eps) {
  constexpr int kWords = 2 * kTiles;  // of a thread and row: 4·kTiles neighbours
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2 * kTiles; ++r) {
    u32 words[kWords];
    load_words<kWords>(source, 8 * r + g, 2 * kWords * t, rows, cols, whole, words);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      x.x[r / 2][w / 2][r % 2 + 2 * (w % 2)] = words[w];
    }
  }
  auto visit = [&](auto&& f) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int k = 0; k < kTiles; ++k) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          float low, high;
          unpack<T>(x.x[i][k][r], low, high);
          f(low, high, x.x[i][k][r]);
        }
      }
    }
  };
  float unit = 1.0f, square = 0.0f;
  if constexpr (kAnySize) {
    float largest = 0.0f;
    visit([&](float low, float high, u32&) {
      largest = fmaxf(largest, fmaxf(fabsf(low), fabsf(high)));
    });
    unit = power_to_one(warp_reduce(largest, [](float a, float b) { return fmaxf(a, b); }));
  }
  visit([&](float low, float high, u32&) {
    if constexpr (kAnySize) {
      low *= unit, high *= unit;
    }
    square += low * low + high * high;
  });
  const float norm = sqrtf(warp_sum(square));  // of the matrix times `unit`
  const float factor = norm == 0.0f ? 0.0f : scale / (norm + eps) * unit;
  visit([&](float low, float high, u32& both) { both = pack<half>(low * factor, high * factor); });
  return norm / unit;
}

template <int kTiles, typename T>
__device__ __forceinline__ void store_fragments(const Fragments<kTiles>& x, T* target, int rows,
                                                int cols, bool whole) {
  constexpr int kWords = 2 * kTiles;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2 * kTiles; ++r) {
    u32 words[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      words[w] = x.x[r / 2][w / 2][r % 2 + 2 * (w % 2)];
    }
    store_words<kWords>(target, 8 * r + g, 2 * kWords * t, rows, cols, whole, words);
  }
}

// x, y: `count` contiguous matrices of rows × cols, both ≤ 16·kTiles.
template <int kTiles, typename T>
__global__ void __launch_bounds__(128)
    newton_schulz_small(const T* __restrict__ x, T* __restrict__ y, long long count, int rows,
                        int cols, int steps, float scale, float eps, int whole,
                        const __grid_constant__ Coefficients coefficients) {
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;

  for (long long n = (long long)blockIdx.x * warps + warp; n < count;
       n += (long long)gridDim.x * warps) {
    Fragments<kTiles> matrix;
    load_scaled<false>(matrix, x + n * rows * cols, rows, cols, whole, scale, eps);
    for (int step = 0; step < steps; ++step) {
      Sums<kTiles> sums;
      small_step(matrix, coefficients.of_step[step], sums);
      if (step + 1 == steps) {
        round_sums<kTiles, T>(sums, matrix);
      } else {
        round_sums<kTiles, half>(sums, matrix);
      }
    }
    store_fragments(matrix, y + n * rows * cols, rows, cols, whole);
  }
}

// dx of `count` matrices, from x and dy alone. Forward runs again and keeps its iterates; then,
// from the last step to the first, with A and B = b·A + c·A² of that step's X:
//   S = dX·Xᵀ + X·dXᵀ, P = b·S + c·(A·S + S·A), dX ← a·dX + B·dX + P·X.
// Both halves of S and of A·S + S·A are products, summed in fp32: one product and its transpose
// would be rounded in between. It is linear in dy, so dy is brought to norm kScale first: 16 bits
// have the range for that.
// Dynamic shared memory: 512·kTiles² bytes a step and warp. A thread reads what it wrote itself, so
// that no barrier is needed.
template <int kTiles, typename T>
__global__ void __launch_bounds__(128, 3)
    newton_schulz_small_backward(const T* __restrict__ x, const T* __restrict__ dy,
                                 T* __restrict__ dx, long long count, int rows, int cols, int steps,
                                 float eps, int whole,
                                 const __grid_constant__ Coefficients coefficients) {
  constexpr float kScale = 0.125f;
  constexpr int kPiece = 32 * 16;  // a warp's, of one 16 × 16 block
  constexpr int kIterate = kTiles * kTiles * kPiece;
  extern __shared__ __align__(1024) unsigned char memory[];
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const u32 iterates = shared_address(memory) + warp * steps * kIterate + threadIdx.x % 32 * 16;

  for (long long n = (long long)blockIdx.x * warps + warp; n < count;
       n += (long long)gridDim.x * warps) {
    const long long offset = n * rows * cols;
    Fragments<kTiles> matrix, grad;
    const float norm = load_scaled<false>(matrix, x + offset, rows, cols, whole, 1.0f, eps);
    const float upstream = load_scaled<true>(grad, dy + offset, rows, cols, whole, kScale, 0.0f);
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int i = 0; i < kTiles * kTiles; ++i) {
        store_shared(iterates + step * kIterate + i * kPiece, matrix.x[i / kTiles][i % kTiles]);
      }
      if (step + 1 < steps) {
        Sums<kTiles> sums;
        small_step(matrix, coefficients.of_step[step], sums);
        round_sums<kTiles, half>(sums, matrix);
      }
    }

    for (int step = steps - 1; step >= 0; --step) {
      const float (&f)[3] = coefficients.of_step[step];
      Fragments<kTiles> gram, polynomial, both, mixed;
#pragma unroll
      for (int i = 0; i < kTiles * kTiles; ++i) {
        load_shared(iterates + step * kIterate + i * kPiece, matrix.x[i / kTiles][i % kTiles]);
      }
      Sums<kTiles> sums = {};
      multiply_transposed<kTiles, half>(sums, grad, matrix);
      multiply_transposed<kTiles, half>(sums, matrix, grad);
      round_sums<kTiles, half>(sums, both);
      gram_polynomial(matrix, f[1], f[2], gram, polynomial);
      Sums<kTiles> across = {};
      multiply_transposed<kTiles, half>(across, gram, both);
      multiply_transposed<kTiles, half>(across, both, gram);
      mix(mixed, f[1], both, f[2], across);
      set(sums, grad, f[0]);
      multiply(sums, polynomial, grad);
      multiply(sums, mixed, matrix);
      round_sums<kTiles, half>(sums, grad);
    }

    // Through x/(‖x‖ + ε): dx = dX/(‖x‖ + ε) − X·⟨dX, X⟩/‖x‖.
    float along = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * kTiles * kTiles; ++i) {
      float g0, g1, v0, v1;
      unpack<half>(grad.x[i / 4 / kTiles][i / 4 % kTiles][i % 4], g0, g1);
      unpack<half>(matrix.x[i / 4 / kTiles][i / 4 % kTiles][i % 4], v0, v1);
      along += g0 * v0 + g1 * v1;
    }
    along = warp_sum(along);
    const float unscaled = upstream / kScale;
    const float p = norm == 0.0f ? 0.0f : unscaled / (norm + eps);
    const float q = norm == 0.0f ? 0.0f : -unscaled * along / norm;
#pragma unroll
    for (int i = 0; i < 4 * kTiles * kTiles; ++i) {
      u32& word = grad.x[i / 4 / kTiles][i / 4 % kTiles][i % 4];
      float g0, g1, v0, v1;
      unpack<half>(word, g0, g1);
      unpack<half>(matrix.x[i / 4 / kTiles][i / 4 % kTiles][i % 4], v0, v1);
      word = pack<T>(p * g0 + q * v0, p * g1 + q * v1);
    }
    store_fragments(grad, dx + offset, rows, cols, whole);
  }
}

}  // namespace fastweights
