// Newton–Schulz on stacks of wide matrices on Hopper, up to 64 × 1024 and 128 × 512: X stays in
// shared memory from its load to its store, and is updated in place. What such a matrix leaves of a
// multiprocessor is no second block, so that four warpgroups share it.
//
//   warpgroup (r, p)   row r of tiles; of the columns of tiles p, p + kParts, …
//   A = X·Xᵀ           each part sums over its columns; a part gathers the sums of its share of A
//   a·I + b·A + c·A²   every part forms its rows whole, as it needs them as left operands
//   X                  a column of tiles is read by the kRowTiles warpgroups that write it
#pragma once

#include <fastweights/wgmma.cuh>

#include "stack.cuh"

namespace fastweights {

template <int kRowTiles, int kColTiles, bool kTall>
struct Wide : StackTiles<kRowTiles, kColTiles, kTall, 4> {
  using Base = StackTiles<kRowTiles, kColTiles, kTall, 4>;
  using Base::gram_tile, Base::tile, Base::kGram, Base::kUpdate, Base::group, Base::lane,
      Base::warp;
  using typename Base::Compute, typename Base::Gram;
  static constexpr int kParts = 4 / kRowTiles;
  static_assert(kColTiles % kParts == 0);
  static constexpr int kShare = 4 / kParts;  // of a part, in steps of a left operand
  static constexpr int kStepBytes = 128 * 8 * sizeof(float);
  static constexpr int kSumsBytes = (kParts - 1) * kRowTiles * kRowTiles * 4 * kStepBytes;

  int row = group / kParts;
  int part = group % kParts;
  Diagonal diagonal{lane};

  __device__ __forceinline__ static void sync() { sync_anywhere<Base::kThreads>(1); }
  __device__ __forceinline__ static void publish() {
    fence_async();
    sync();
  }

  // Where this thread leaves what `source` has for step `step` of A's tile (row, r), which another
  // part gathers.
  __device__ __forceinline__ u32 place(u32 sums, int source, int step, int r) const {
    const int gatherer = step / kShare;
    const int from = source - (source > gatherer);
    const int slot = ((gatherer * (kParts - 1) + from) * kRowTiles + row) * kRowTiles + r;
    return sums + (slot * kShare + step % kShare) * kStepBytes + threadIdx.x % 128 * 16;
  }

  // A into tiles; X has `used` columns of tiles.
  __device__ __forceinline__ void gram(u32 x, u32 sums, u32 a, int used) const {
    Accumulator sum[kRowTiles] = {};
    const TileName tiles(x);
#pragma unroll 1
    for (int k = part; k < used; k += kParts) {
      wgmma_begin();
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        multiply<Compute, kGram, kGram>(sum[r], tile(tiles, row, k), tile(tiles, r, k), true);
      }
      wgmma_commit();
    }
    wgmma_wait<0>(sum);
    repeat<4>([&](auto step_) {
      constexpr int step = decltype(step_)::value;
      if (part != step / kShare) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          store_floats(place(sums, part, step, r), &sum[r].x[8 * step]);
        }
      }
    });
    sync();
    repeat<4>([&](auto step_) {
      constexpr int step = decltype(step_)::value;
      if (part == step / kShare) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          float* const own = &sum[r].x[8 * step];
#pragma unroll
          for (int other = 0; other < kParts; ++other) {
            if (other != step / kShare) {
              add_floats(place(sums, other, step, r), own);
            }
          }
          u32 rounded[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            rounded[i] = pack<Compute>(own[2 * i], own[2 * i + 1]);
          }
          store_matrices<false>(left_address<false>(gram_tile(a, row, r), step, warp, lane),
                                rounded);
        }
      }
    });
    publish();
  }

  // a·I + b·A + c·A², this warpgroup's row of tiles.
  __device__ __forceinline__ void polynomial(const float (&f)[3], u32 a, Gram& out) const {
    Gram gram;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      load_left<false>(gram_tile(a, row, r), gram[r], warp, lane);
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      Accumulator sum;
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < kRowTiles; ++k) {
        multiply<Compute, Major::kAcross>(sum, gram[k], gram_tile(TileName(a), k, r), k > 0);
      }
      wgmma_commit();
      wgmma_wait<0>(sum);
      round_polynomial<Compute>(f, gram[r], sum, kRowTiles == 1 || r == row, diagonal, warp,
                                out[r]);
    }
  }

  // X ← left·X.
  __device__ __forceinline__ void update(const Gram& left, u32 x, int used) const {
    const TileName tiles(x);
#pragma unroll 1
    for (int k = part; k < used; k += kParts) {
      Accumulator sum;
      wgmma_begin();
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        multiply<Compute, kUpdate>(sum, left[r], tile(tiles, r, k), r > 0);
      }
      wgmma_commit();
      wgmma_wait<0>(sum);
      Left rounded;
      round_to_left<Compute>(sum, rounded);
      sync_anywhere<128 * kRowTiles>(2 + part);  // all are through with this column
      store_left<kTall>(tile(x, row, k), rounded, warp, lane);
    }
    publish();
  }

 private:
  __device__ __forceinline__ static void store_floats(u32 address, const float* x) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 bits[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bits[i] = __float_as_uint(x[4 * half + i]);
      }
      store_shared(address + half * (kStepBytes / 2), bits);
    }
  }
  __device__ __forceinline__ static void add_floats(u32 address, float* x) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 bits[4];
      load_shared(address + half * (kStepBytes / 2), bits);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[4 * half + i] += __uint_as_float(bits[i]);
      }
    }
  }
};

// As newton_schulz. Dynamic shared memory: kScratchBytes, X, A and kSumsBytes.
template <int kRowTiles, int kColTiles, bool kTall, typename T>
__global__ void __launch_bounds__(512, 1)
    newton_schulz_wide(const T* __restrict__ x, T* __restrict__ y, long long count, int rows,
                       int cols, int steps, float scale, float eps, int whole,
                       const __grid_constant__ Coefficients coefficients) {
  using S = Wide<kRowTiles, kColTiles, kTall>;
  extern __shared__ __align__(1024) unsigned char memory[];
  float* const scratch = reinterpret_cast<float*>(memory);
  const S stack;
  const u32 x_tiles = shared_address(memory) + kScratchBytes;
  const u32 a_tiles = x_tiles + S::kBytes;
  const u32 sums = a_tiles + S::kGramBytes;
  // Columns of tiles that hold numbers, and zeros up to as many for each part.
  const int used = ((kTall ? rows : cols) + 64 * S::kParts - 1) / (64 * S::kParts) * S::kParts;

  for (long long n = blockIdx.x; n < count; n += gridDim.x) {
    stack.template load<false>(x_tiles, x + n * rows * cols, rows, cols, whole, scale, eps,
                               scratch);
    S::publish();
    for (int step = 0; step < steps; ++step) {
      typename S::Gram polynomial;
      stack.gram(x_tiles, sums, a_tiles, used);
      stack.polynomial(coefficients.of_step[step], a_tiles, polynomial);
      stack.update(polynomial, x_tiles, used);
    }
    stack.unload(x_tiles, y + n * rows * cols, rows, cols, whole);
  }
}

}  // namespace fastweights
