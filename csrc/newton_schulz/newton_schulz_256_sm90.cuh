// Newton–Schulz on stacks of matrices up to 256 × 256 on Hopper, a block each.
//
// X takes 128 KiB of shared memory, so that a second matrix of its size has no place. But A and B
// are symmetric: ten of their sixteen tiles say all, and each is formed once. A tile on the other
// side of the diagonal is read across.
//
//   tiles of A and B by warpgroup     0: (0,0) (3,3)    1: (1,0) (1,1)
//                                     2: (2,0) (2,1) (2,2)    3: (3,0) (3,1) (3,2)
//   rows of X by warpgroup            one row of tiles each
#pragma once

#include "stack_sm90.cuh"

namespace fastweights {

// The lower triangle of a symmetric 256 × 256 matrix, in tiles.
struct Triangle {
  __device__ __forceinline__ static constexpr u32 offset(int r, int c) {
    return (r * (r + 1) / 2 + c) * Tile::kBytes;
  }

  // Block (r, c), any of the sixteen, as a left operand.
  template <int r, int c>
  __device__ __forceinline__ static void load(u32 base, Left& a, int warp, int lane) {
    if constexpr (r >= c) {
      load_left<false>(base + offset(r, c), a, warp, lane);
    } else {
      load_left<true>(base + offset(c, r), a, warp, lane);
    }
  }

  // d (+)= (block (r, k))·tile.
  template <int r, int k, Major kRight>
  __device__ __forceinline__ static void multiply_tile(Accumulator& d, TileName one, TileName tile,
                                                       bool accumulate) {
    constexpr Major kLeft = r >= k ? Major::kAlongK : Major::kAcross;
    multiply<half, kLeft, kRight>(d, one + (r >= k ? offset(r, k) : offset(k, r)), tile,
                                  accumulate);
  }

  // d (+)= (block (r, k) of one)·(block (k, c) of other).
  template <int r, int k, int c>
  __device__ __forceinline__ static void multiply_blocks(Accumulator& d, TileName one,
                                                         TileName other, bool accumulate) {
    constexpr Major kRight = k >= c ? Major::kAcross : Major::kAlongK;
    multiply_tile<r, k, kRight>(d, one, other + (k >= c ? offset(k, c) : offset(c, k)), accumulate);
  }
};

// The part of warpgroup kWho.
template <int kWho, bool kTall>
struct Part {
  using S = Stack<4, 4, kTall>;
  static constexpr int kTiles = kWho < 2 ? 2 : 3;
  __device__ __forceinline__ static constexpr int row(int i) { return kWho == 0 ? 3 * i : kWho; }
  __device__ __forceinline__ static constexpr int col(int i) { return kWho == 0 ? 3 * i : i; }

  int warp = threadIdx.x / 32 % 4;
  int lane = threadIdx.x % 32;
  Diagonal diagonal{lane};

  // Tile kTile of X·Xᵀ.
  template <int kTile>
  __device__ __forceinline__ void gram(u32 x, Accumulator (&sum)[1]) const {
    const TileName tiles(x);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      multiply<half, S::kGram, S::kGram>(sum[0], S::tile(tiles, row(kTile), k),
                                         S::tile(tiles, col(kTile), k), k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>(sum);
  }

  // Tile kTile of A².
  template <int kTile>
  __device__ __forceinline__ void square(u32 a, Accumulator (&sum)[1]) const {
    const TileName tiles(a);
    wgmma_begin();
    repeat<4>([&](auto k_) {
      constexpr int k = decltype(k_)::value;
      Triangle::multiply_blocks<row(kTile), k, col(kTile)>(sum[0], tiles, tiles, k > 0);
    });
    wgmma_commit();
    wgmma_wait<0>(sum);
  }

  __device__ __forceinline__ void store(u32 a, const Left (&tiles)[kTiles]) const {
    repeat<kTiles>([&](auto i_) {
      constexpr int i = decltype(i_)::value;
      store_left<false>(a + Triangle::offset(row(i), col(i)), tiles[i], warp, lane);
    });
  }

  // X ← (a·I + b·A + c·A²)·X in place.
  __device__ __forceinline__ void step(u32 x, u32 a, const float (&f)[3]) const {
    Left tiles[kTiles];
    repeat<kTiles>([&](auto i_) {
      constexpr int i = decltype(i_)::value;
      Accumulator sum[1];
      gram<i>(x, sum);
      round_to_left<half>(sum[0], tiles[i]);
    });
    store(a, tiles);
    S::publish();
    repeat<kTiles>([&](auto i_) {
      constexpr int i = decltype(i_)::value;
      Accumulator sum[1];
      square<i>(a, sum);
      round_polynomial<half>(f, tiles[i], sum[0], row(i) == col(i), diagonal, warp, tiles[i]);
    });
    S::sync();  // all are through with A
    store(a, tiles);
    S::publish();
    Left left[4];
    repeat<4>([&](auto k_) {
      constexpr int k = decltype(k_)::value;
      Triangle::load<kWho, k>(a, left[k], warp, lane);
    });
    repeat<4>([&](auto c_) {
      constexpr int c = decltype(c_)::value;
      Accumulator sum[1];
      Left updated;
      const TileName tiles(x);
      wgmma_begin();
      repeat<4>([&](auto k_) {
        constexpr int k = decltype(k_)::value;
        multiply<half, S::kUpdate>(sum[0], left[k], S::tile(tiles, k, c), k > 0);
      });
      wgmma_commit();
      wgmma_wait<0>(sum);
      round_to_left<half>(sum[0], updated);
      S::sync();  // all are through with this column of X
      store_left<kTall>(S::tile(x, kWho, c), updated, warp, lane);
    });
    S::publish();
  }
};

// Calls f(Index<w>{}), w this thread's warpgroup of the four.
template <typename F>
__device__ __forceinline__ void by_warpgroup(F&& f) {
  switch (threadIdx.x / 128) {
    case 0:
      return f(Index<0>{});
    case 1:
      return f(Index<1>{});
    case 2:
      return f(Index<2>{});
    default:
      return f(Index<3>{});
  }
}

// As newton_schulz. Dynamic shared memory: kScratchBytes, X and the triangle, 209 KiB.
template <bool kTall, typename T>
__global__ void __launch_bounds__(512, 1)
    newton_schulz_256(const T* __restrict__ x, T* __restrict__ y, long long count, int rows,
                      int cols, int steps, float scale, float eps, int whole,
                      const __grid_constant__ Coefficients coefficients) {
  using S = Stack<4, 4, kTall>;
  extern __shared__ __align__(1024) unsigned char memory[];
  float* const scratch = reinterpret_cast<float*>(memory);
  const S stack;
  const u32 x_tiles = shared_address(memory) + kScratchBytes;
  const u32 a_tiles = x_tiles + S::kBytes;

  for (long long n = blockIdx.x; n < count; n += gridDim.x) {
    stack.template load<false>(x_tiles, x + n * rows * cols, rows, cols, whole, scale, eps,
                               scratch);
    S::publish();
    by_warpgroup([&](auto who) {
      const Part<decltype(who)::value, kTall> part;
      for (int step = 0; step < steps; ++step) {
        part.step(x_tiles, a_tiles, coefficients.of_step[step]);
      }
    });
    stack.unload(x_tiles, y + n * rows * cols, rows, cols, whole);
  }
}

}  // namespace fastweights
