// The backward of Newton–Schulz on stacks of matrices up to 256 × 256 on Hopper, a block each.
//
// As in newton_schulz_backward, per step: S = dX·Xᵀ + X·dXᵀ, P = b·S + c·(A·S + S·A),
// B = b·A + c·A², dX ← a·dX + B·dX + P·X. A, S, B and P are symmetric, and lower triangles of
// tiles. Two warpgroups form five tiles of a triangle each: that many accumulators at once want
// more registers than threads of four could have.
//
// The iterates and dX wait in global memory. Shared memory, in KiB from the tiles on:
//
//   forward               0 X                        128       144 A, then B    224
//   S                     0 X                        128 dX, a column of tiles twice   192
//   A, after S            0 X, then A                          144 S            224
//   the rest              0 A, then B    80 a column of X, of dX   144 S, then P       224
#pragma once

#include "newton_schulz_256_sm90.cuh"

namespace fastweights {

template <int kWho, bool kTall>
struct BackwardPart {
  using S = Stack<4, 4, kTall, 2, 2>;
  static constexpr int kTiles = 5;
  static constexpr u32 kColumnBytes = 4 * Tile::kBytes;
  // Places, from the tiles on.
  static constexpr u32 kColumn = 10 * Tile::kBytes;
  static constexpr u32 kTriangle = kColumn + 2 * kColumnBytes;
  static constexpr u32 kOwnBytes = S::kOwn * kWho * Tile::kBytes;  // of a column, before its own
  // Where tile i of this warpgroup is in a triangle.
  __device__ __forceinline__ static constexpr int row(int i) {
    const int number = kTiles * kWho + i;
    return number < 1 ? 0 : number < 3 ? 1 : number < 6 ? 2 : 3;
  }
  __device__ __forceinline__ static constexpr int col(int i) {
    return kTiles * kWho + i - row(i) * (row(i) + 1) / 2;
  }

  S stack;
  u32 zero;  // address of a word that is 0

  // The same address, in a way that the compiler cannot know. What follows from it is worked out
  // where it is used; ptxas would keep the hundreds of descriptors in registers, and run out of
  // them.
  __device__ __forceinline__ u32 fresh(u32 address) const { return address + load_word(zero); }

  // Calls start(tile, sum) for this warpgroup's tiles, to start the products of each.
  template <typename F>
  __device__ __forceinline__ static void each(Accumulator (&sum)[kTiles], F&& start) {
    wgmma_begin();
    repeat<kTiles>([&](auto i) { start(i, sum[decltype(i)::value]); });
    wgmma_commit();
  }

  __device__ __forceinline__ void store(u32 triangle, const Left (&tiles)[kTiles]) const {
    const u32 base = fresh(triangle);
    repeat<kTiles>([&](auto i_) {
      constexpr int i = decltype(i_)::value;
      store_left<false>(base + Triangle::offset(row(i), col(i)), tiles[i], stack.warp, stack.lane);
    });
  }

  // What this warpgroup owns of column k, from global memory, and to the place of the column.
  __device__ __forceinline__ static void fetch(const uint4* kept, int k, Left (&own)[S::kOwn]) {
#pragma unroll
    for (int j = 0; j < S::kOwn; ++j) {
      S::recall(kept, S::kOwn * k + j, own[j]);
    }
  }
  __device__ __forceinline__ void put(u32 column, const Left (&own)[S::kOwn]) const {
    const u32 base = fresh(column + kOwnBytes);
#pragma unroll
    for (int j = 0; j < S::kOwn; ++j) {
      store_left<kTall>(base + j * Tile::kBytes, own[j], stack.warp, stack.lane);
    }
  }

  // S, from X in its tiles. The next column of dX comes while the products with one run.
  __device__ __forceinline__ void cross(u32 x, const uint4* d_kept, u32 d_columns,
                                        Left (&tiles)[kTiles]) const {
    Accumulator sum[kTiles] = {};
    Left own[S::kOwn];
    fetch(d_kept, 0, own);
    put(d_columns, own);
    S::publish();
#pragma unroll 1
    for (int k = 0; k < 4; ++k) {
      const TileName values(fresh(S::tile(x, 0, k))),
          grads(fresh(d_columns + k % 2 * kColumnBytes));
      each(sum, [&](auto i, Accumulator& d) {
        constexpr u32 r = row(decltype(i)::value), c = col(decltype(i)::value);
        multiply<half, S::kGram, S::kGram>(d, grads + r * Tile::kBytes, S::tile(values, c, 0),
                                           true);
        multiply<half, S::kGram, S::kGram>(d, S::tile(values, r, 0), grads + c * Tile::kBytes,
                                           true);
      });
      if (k < 3) {
        fetch(d_kept, k + 1, own);
        put(d_columns + (k + 1) % 2 * kColumnBytes, own);
      }
      wgmma_wait<0>(sum);
      S::publish();
    }
    round(sum, tiles);
  }

  // A.
  __device__ __forceinline__ void gram(u32 x, Left (&tiles)[kTiles]) const {
    Accumulator sum[kTiles] = {};
#pragma unroll 1
    for (int k = 0; k < 4; ++k) {
      const TileName values(fresh(S::tile(x, 0, k)));
      each(sum, [&](auto i, Accumulator& d) {
        constexpr int r = row(decltype(i)::value), c = col(decltype(i)::value);
        multiply<half, S::kGram, S::kGram>(d, S::tile(values, r, 0), S::tile(values, c, 0), true);
      });
    }
    wgmma_wait<0>(sum);
    round(sum, tiles);
  }

  __device__ __forceinline__ static void round(const Accumulator (&sum)[kTiles],
                                               Left (&tiles)[kTiles]) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      round_to_left<half>(sum[i], tiles[i]);
    }
  }

  // f[0]·I + f[1]·M + f[2]·(sum of products), in place of the triangle M; all threads are through
  // with it.
  __device__ __forceinline__ void mix_into(u32 triangle, const float (&f)[3],
                                           Accumulator (&sum)[kTiles]) const {
    const u32 base = fresh(triangle);
    repeat<kTiles>([&](auto i_) {
      constexpr int i = decltype(i_)::value;
      const u32 tile = base + Triangle::offset(row(i), col(i));
      Left own;
      load_left<false>(tile, own, stack.warp, stack.lane);
      round_polynomial<half>(f, own, sum[i], row(i) == col(i), stack.diagonal, stack.warp, own);
      store_left<false>(tile, own, stack.warp, stack.lane);
    });
  }

  // P over S.
  __device__ __forceinline__ void cross_polynomial(u32 a, u32 s, float b, float c) const {
    Accumulator sum[kTiles];
    each(sum, [&](auto i, Accumulator& d) {
      const TileName gram(fresh(a)), crossed(fresh(s));
      constexpr int r = row(decltype(i)::value), c = col(decltype(i)::value);
      repeat<4>([&](auto k_) {
        constexpr int k = decltype(k_)::value;
        Triangle::multiply_blocks<r, k, c>(d, gram, crossed, k > 0);
        Triangle::multiply_blocks<r, k, c>(d, crossed, gram, true);
      });
    });
    wgmma_wait<0>(sum);
    S::sync();  // all are through with S
    mix_into(s, {0.0f, b, c}, sum);
  }

  // B, with a·I, over A.
  __device__ __forceinline__ void polynomial(u32 a, const float (&f)[3]) const {
    Accumulator sum[kTiles];
    each(sum, [&](auto i, Accumulator& d) {
      const TileName gram(fresh(a));
      constexpr int r = row(decltype(i)::value), c = col(decltype(i)::value);
      repeat<4>([&](auto k_) {
        constexpr int k = decltype(k_)::value;
        Triangle::multiply_blocks<r, k, c>(d, gram, gram, k > 0);
      });
    });
    wgmma_wait<0>(sum);
    S::sync();  // all are through with A
    mix_into(a, f, sum);
    S::publish();
  }

  // Start sum (+)= (this warpgroup's rows of a triangle)·(a column, a tile every kStride bytes).
  template <u32 kStride, bool kAdd>
  __device__ __forceinline__ void apply(u32 triangle, u32 column,
                                        Accumulator (&sum)[S::kOwn]) const {
    repeat<S::kOwn>([&](auto j_) {
      const TileName left(fresh(triangle)), right(fresh(column));
      constexpr int j = decltype(j_)::value;
      repeat<4>([&](auto k_) {
        constexpr int k = decltype(k_)::value;
        Triangle::multiply_tile<S::kOwn * kWho + j, k, S::kUpdate>(
            sum[j], left, right + k * kStride, kAdd || k > 0);
      });
    });
  }

  // X ← B·X in place, with A and then B in the triangle.
  __device__ __forceinline__ void forward(u32 x, u32 triangle, const float (&f)[3]) const {
    Left tiles[kTiles];
    gram(x, tiles);
    store(triangle, tiles);
    S::publish();
    polynomial(triangle, f);
#pragma unroll 1
    for (int k = 0; k < 4; ++k) {
      Left own[S::kOwn];
      Accumulator sum[S::kOwn];
      const u32 base = fresh(x);
      wgmma_begin();
      apply<kTall ? Tile::kBytes : kColumnBytes, false>(triangle, S::tile(x, 0, k), sum);
      wgmma_commit();
      wgmma_wait<0>(sum);
      S::sync();  // all are through with this column of X
#pragma unroll
      for (int j = 0; j < S::kOwn; ++j) {
        round_to_left<half>(sum[j], own[j]);
        stack.put(base, S::kOwn * k + j, own[j]);
      }
    }
    S::publish();
  }

  // The step of dX, in global memory; X is in its tiles, and there.
  __device__ __forceinline__ void backward(u32 x, const uint4* x_kept, uint4* d_kept,
                                           const float (&f)[3]) const {
    const u32 column = x + kColumn, s = x + kTriangle;
    {
      Left tiles[kTiles];
      cross(x, d_kept, x + S::kBytes, tiles);
      store(s, tiles);
      gram(x, tiles);
      S::sync();  // all are through with X
      store(x, tiles);
      S::publish();
    }
    cross_polynomial(x, s, f[1], f[2]);
    polynomial(x, f);
    // dX ← B·dX + P·X, column by column.
#pragma unroll 1
    for (int k = 0; k < 4; ++k) {
      Left values[S::kOwn], grads[S::kOwn];
      fetch(x_kept, k, values);
      fetch(d_kept, k, grads);
      Accumulator sum[S::kOwn];
      put(column, values);
      put(column + kColumnBytes, grads);
      S::publish();
      wgmma_begin();
      apply<Tile::kBytes, false>(x, column + kColumnBytes, sum);
      apply<Tile::kBytes, true>(s, column, sum);
      wgmma_commit();
      wgmma_wait<0>(sum);
#pragma unroll
      for (int j = 0; j < S::kOwn; ++j) {
        Left updated;
        round_to_left<half>(sum[j], updated);
        S::keep(d_kept, S::kOwn * k + j, updated);
      }
      S::sync();  // all are through with the column
    }
  }
};

// dX − ratio·⟨dX, X⟩·X into tiles.
template <typename S>
__device__ __forceinline__ void project(const S& stack, u32 tiles, const uint4* x_kept,
                                        const uint4* d_kept, float ratio, float* scratch) {
  constexpr int kOwned = S::kBytes / S::kThreads / int(sizeof(Left));
  Left values, grads;
  float along = 0.0f;
#pragma unroll 1
  for (int k = 0; k < kOwned; ++k) {
    S::recall(x_kept, k, values);
    S::recall(d_kept, k, grads);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float g0, g1, v0, v1;
      unpack<half>(grads.x[i / 4][i % 4], g0, g1);
      unpack<half>(values.x[i / 4][i % 4], v0, v1);
      along += g0 * v0 + g1 * v1;
    }
  }
  along = S::block_sum(along, scratch);
#pragma unroll 1
  for (int k = 0; k < kOwned; ++k) {
    S::recall(x_kept, k, values);
    S::recall(d_kept, k, grads);
    S::combine(grads, 1.0f, grads, -ratio * along, values);
    stack.put(tiles, k, grads);
  }
  __syncthreads();
}

// dX of the last iterate to that of the first.
template <int kWho, bool kTall>
__device__ __forceinline__ void run_backward(u32 tiles, uint4* iterates, uint4* d_kept, int steps,
                                             u32 zero, const Coefficients& coefficients) {
  using Part = BackwardPart<kWho, kTall>;
  constexpr int kWaiting = Part::S::kBytes / 16;
  const Part part{{}, zero};
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    part.stack.keep(tiles, iterates + step * kWaiting);
    if (step + 1 < steps) {
      part.forward(tiles, tiles + Part::kTriangle, coefficients.of_step[step]);
    }
  }
#pragma unroll 1
  for (int step = steps - 1; step >= 0; --step) {
    if (step + 1 < steps) {
      part.stack.recall(tiles, iterates + step * kWaiting);
    }
    part.backward(tiles, iterates + step * kWaiting, d_kept, coefficients.of_step[step]);
  }
}

// As newton_schulz_backward, by 256 threads, with all iterates and dX in `ring`: of a block,
// (steps + 1)·128 KiB. Dynamic shared memory: kScratchBytes and 224 KiB.
template <bool kTall, typename T>
__global__ void __launch_bounds__(256, 1)
    newton_schulz_256_backward(const T* __restrict__ x, const T* __restrict__ dy,
                               T* __restrict__ dx, uint4* ring, long long count, int rows, int cols,
                               int steps, float eps, int whole,
                               const __grid_constant__ Coefficients coefficients) {
  using S = Stack<4, 4, kTall, 2, 2>;
  constexpr float kScale = 0.125f;
  constexpr int kWaiting = S::kBytes / 16;
  extern __shared__ __align__(1024) unsigned char memory[];
  float* const scratch = reinterpret_cast<float*>(memory);
  const S stack;
  const u32 tiles = shared_address(memory) + kScratchBytes, zero = tiles - sizeof(float);
  scratch[kScratchBytes / sizeof(float) - 1] = 0.0f;
  uint4* const d_kept = ring + (long long)blockIdx.x * (steps + 1) * kWaiting;
  uint4* const iterates = d_kept + kWaiting;

  for (long long n = blockIdx.x; n < count; n += gridDim.x) {
    const long long offset = n * rows * cols;
    const float upstream =
        stack.template load<true>(tiles, dy + offset, rows, cols, whole, kScale, 0.0f, scratch);
    __syncthreads();
    stack.keep(tiles, d_kept);
    const float norm =
        stack.template load<false>(tiles, x + offset, rows, cols, whole, 1.0f, eps, scratch);
    S::publish();
    if (threadIdx.x < 128) {
      run_backward<0, kTall>(tiles, iterates, d_kept, steps, zero, coefficients);
    } else {
      run_backward<1, kTall>(tiles, iterates, d_kept, steps, zero, coefficients);
    }
    // dx = dX/(‖x‖ + ε) − X·⟨dX, X⟩/‖x‖, the part of it that differs from place to place first.
    project(stack, tiles, iterates, d_kept, norm == 0.0f ? 0.0f : (norm + eps) / norm, scratch);
    stack.unload(tiles, dx + offset, rows, cols, whole,
                 norm == 0.0f ? 0.0f : upstream / kScale / (norm + eps));
  }
}

}  // namespace fastweights
