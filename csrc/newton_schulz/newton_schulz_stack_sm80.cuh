// Newton–Schulz on stacks of matrices without wgmma, up to 128 × 256 or 256 × 128, a block each:
// a matrix stays in shared memory from its load to its store, and the products are mma.sync. Wide
// form, per step: A = X·Xᵀ, B = b·A + c·A², X ← a·X + B·X.
//
// A warp owns 16 rows of X and of all that has X's rows, and holds its left operands in registers.
//
//   shared memory, KiB    X and dX   A    forward   backward
//    64 ×  64                 8       8      17        25
//   128 × 128                32      32      65        97     (99 is what sm_86 and sm_89 have)
//   128 × 256                64      32      97       161     (163 is what sm_80 has)
#pragma once

#include <fastweights/mma_tiles.cuh>

#include "stack.cuh"

namespace fastweights {

template <int kRowTiles, int kColTiles, bool kTall>
struct Strips : StackTiles<kRowTiles, kColTiles, kTall> {
  using Base = StackTiles<kRowTiles, kColTiles, kTall>;
  using Base::gram_tile, Base::tile, Base::kGram, Base::kUpdate, Base::kPieces, Base::kThreads;
  using Base::group, Base::lane, Base::warp, Base::load;
  using typename Base::Compute, typename Base::Gram;

  Diagonal diagonal{lane};

  // Pieces that save and restore have on their way: four of 64 rows would push registers to memory.
  static constexpr int kAtOnce = 2 * kRowTiles;

  // x·yᵀ over the columns, this warp's rows.
  __device__ __forceinline__ void product(u32 x, u32 y, Gram& rows) const {
    Accumulator sums[kRowTiles] = {};
#pragma unroll 1
    for (int k = 0; k < kColTiles; ++k) {
      Left own;
      load_left<kTall>(tile(x, group, k), own, warp, lane);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        multiply_add<Compute, kGram>(sums[r], own, tile(y, r, k), lane);
      }
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      round_to_left<Compute>(sums[r], rows[r]);
    }
  }

  __device__ __forceinline__ void store(u32 a, const Gram& rows) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      store_left_words<false>(gram_tile(a, group, r), rows[r], warp, lane);
    }
  }

  __device__ __forceinline__ void load(u32 a, Gram& rows) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      load_left<false>(gram_tile(a, group, r), rows[r], warp, lane);
    }
  }

  // left·right, right a rows × rows matrix in tiles, by column r of tiles to finish(r, sum).
  template <typename Finish>
  __device__ __forceinline__ void square_product(const Gram& left, u32 right,
                                                 Finish&& finish) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      Accumulator sum = {};
#pragma unroll
      for (int k = 0; k < kRowTiles; ++k) {
        multiply_add<Compute, Major::kAcross>(sum, left[k], gram_tile(right, k, r), lane);
      }
      finish(r, sum);
    }
  }

  // a·I + b·A + c·A², with A in registers and in tiles.
  __device__ __forceinline__ void polynomial(const float (&f)[3], const Gram& gram, u32 a,
                                             Gram& out) const {
    square_product(gram, a, [&](int r, Accumulator& sum) {
      round_polynomial<Compute>(f, gram[r], sum, kRowTiles == 1 || r == group, diagonal, warp,
                                out[r]);
    });
  }

  // out += left·(column tile k of x).
  __device__ __forceinline__ void apply(const Gram& left, u32 x, int k, Accumulator& out) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      multiply_add<Compute, kUpdate>(out, left[r], tile(x, r, k), lane);
    }
  }

  // x ← left·x (kSecond: + second·y). A column tile of the result is formed from the same one
  // of x and y alone, so that it takes its place as soon as all warps are through with that.
  template <bool kSecond>
  __device__ __forceinline__ void update(u32 x, const Gram& left, const Gram& second, u32 y) const {
#pragma unroll 1
    for (int k = 0; k < kColTiles; ++k) {
      Accumulator sum = {};
      apply(left, x, k, sum);
      if constexpr (kSecond) {
        apply(second, y, k, sum);
      }
      Left rounded;
      round_to_left<Compute>(sum, rounded);
      __syncthreads();
      store_left_words<kTall>(tile(x, group, k), rounded, warp, lane);
    }
    __syncthreads();
  }

  // One step of forward on x.
  __device__ __forceinline__ void step(u32 x, u32 a, const float (&f)[3]) const {
    Gram gram, all;
    product(x, x, gram);
    store(a, gram);
    __syncthreads();
    polynomial(f, gram, a, all);
    update<false>(x, all, all, x);
  }

  // The tiles of x to and from memory, as they are; a thread gets back what it put there.
  __device__ __forceinline__ void save(u32 x, uint4* to) const {
#pragma unroll kAtOnce
    for (int i = 0; i < kPieces; ++i) {
      u32 piece[4];
      load_shared(x + (i * kThreads + threadIdx.x) * sizeof(uint4), piece);
      to[i * kThreads + threadIdx.x] = make_uint4(piece[0], piece[1], piece[2], piece[3]);
    }
  }
  __device__ __forceinline__ void restore(u32 x, const uint4* from) const {
#pragma unroll kAtOnce
    for (int i = 0; i < kPieces; ++i) {
      const uint4 piece = from[i * kThreads + threadIdx.x];
      store_shared(x + (i * kThreads + threadIdx.x) * sizeof(uint4),
                   {piece.x, piece.y, piece.z, piece.w});
    }
  }
};

// x, y: `count` contiguous matrices of rows × cols; a block takes every gridDim.x-th one.
// Dynamic shared memory: kScratchBytes, X and A.
template <int kRowTiles, int kColTiles, bool kTall, typename T>
__global__ void __launch_bounds__(128 * kRowTiles, kRowTiles == 1 ? 4 : 2)
    newton_schulz_stack(const T* __restrict__ x, T* __restrict__ y, long long count, int rows,
                        int cols, int steps, float scale, float eps, int whole,
                        const __grid_constant__ Coefficients coefficients) {
  using S = Strips<kRowTiles, kColTiles, kTall>;
  extern __shared__ __align__(1024) unsigned char memory[];
  float* const scratch = reinterpret_cast<float*>(memory);
  const S strips;
  const u32 x_tiles = shared_address(memory) + kScratchBytes;
  const u32 a_tiles = x_tiles + S::kBytes;

  for (long long n = blockIdx.x; n < count; n += gridDim.x) {
    strips.template load<false>(x_tiles, x + n * rows * cols, rows, cols, whole, scale, eps,
                                scratch);
    __syncthreads();
    for (int step = 0; step < steps; ++step) {
      strips.step(x_tiles, a_tiles, coefficients.of_step[step]);
    }
    strips.unload(x_tiles, y + n * rows * cols, rows, cols, whole);
  }
}

// dx of `count` matrices, from x and dy alone. Forward runs again and keeps its iterates, all but
// the last, in the block's part of `workspace`; then, from the last step to the first, with A and
// B = b·A + c·A² of that step's X:
//   dZ = dX·Xᵀ, S = dZ + dZᵀ, P = b·S + c·(A·S + (A·S)ᵀ), dX ← a·dX + B·dX + P·X.
// It is linear in dy, so dy is brought to norm kScale first: 16 bits have the range for that.
// One rows × rows matrix at a time is in tiles: dZ, A, S, then A·S.
// Dynamic shared memory: kScratchBytes, X, dX and that. Workspace: (steps − 1)·kBytes a block.
template <int kRowTiles, int kColTiles, bool kTall, typename T>
__global__ void __launch_bounds__(128 * kRowTiles, kRowTiles == 1 ? 3 : 1)
    newton_schulz_stack_backward(const T* __restrict__ x, const T* __restrict__ dy,
                                 T* __restrict__ dx, uint4* workspace, long long count, int rows,
                                 int cols, int steps, float eps, int whole,
                                 const __grid_constant__ Coefficients coefficients) {
  using S = Strips<kRowTiles, kColTiles, kTall>;
  constexpr float kScale = 0.125f;
  constexpr int kIterate = S::kBytes / sizeof(uint4);
  extern __shared__ __align__(1024) unsigned char memory[];
  float* const scratch = reinterpret_cast<float*>(memory);
  const S strips;
  const u32 x_tiles = shared_address(memory) + kScratchBytes;
  const u32 d_tiles = x_tiles + S::kBytes;
  const u32 g_tiles = d_tiles + S::kBytes;
  uint4* const iterates = workspace + (long long)blockIdx.x * (steps - 1) * kIterate;

  for (long long n = blockIdx.x; n < count; n += gridDim.x) {
    const long long offset = n * rows * cols;
    const float norm =
        strips.template load<false>(x_tiles, x + offset, rows, cols, whole, 1.0f, eps, scratch);
    const float upstream =
        strips.template load<true>(d_tiles, dy + offset, rows, cols, whole, kScale, 0.0f, scratch);
    __syncthreads();
    for (int step = 0; step + 1 < steps; ++step) {
      strips.save(x_tiles, iterates + step * kIterate);
      strips.step(x_tiles, g_tiles, coefficients.of_step[step]);
    }
    for (int step = steps - 1; step >= 0; --step) {
      const float (&f)[3] = coefficients.of_step[step];
      typename S::Gram gram, polynomial, grad, mixed;
      if (step + 1 < steps) {
        strips.restore(x_tiles, iterates + step * kIterate);
        __syncthreads();
      }
      strips.product(d_tiles, x_tiles, grad);
      strips.store(g_tiles, grad);
      strips.product(x_tiles, x_tiles, gram);
      __syncthreads();
      strips.add_transposed(grad, 1.0f, g_tiles, 1.0f);  // S
      __syncthreads();
      strips.store(g_tiles, gram);
      __syncthreads();
      strips.polynomial(f, gram, g_tiles, polynomial);
      __syncthreads();
      strips.store(g_tiles, grad);
      __syncthreads();
      strips.square_product(gram, g_tiles, [&](int r, const Accumulator& sum) {
        round_to_left<half>(sum, mixed[r]);
      });
      __syncthreads();
      strips.store(g_tiles, mixed);
      __syncthreads();
      strips.add_transposed(mixed, f[2], g_tiles, f[2]);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        S::combine(mixed[r], 1.0f, mixed[r], f[1], grad[r]);  // P
      }
      strips.template update<true>(d_tiles, polynomial, mixed, x_tiles);
    }

    strips.unload_gradient(d_tiles, x_tiles, dx + offset, rows, cols, whole, upstream / kScale,
                           norm, eps, scratch);
  }
}

}  // namespace fastweights
