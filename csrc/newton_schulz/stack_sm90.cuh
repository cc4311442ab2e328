// A matrix of a stack in shared memory, and the products of Newton–Schulz over it, on Hopper.
//
// X is the wide form (rows ≤ cols) in kRowTiles × kColTiles tiles of 64 × 64; warpgroup i of the
// block owns row tile i (kOwn row tiles from kOwn·i on) of X and of all that has X's rows. Left
// operands are in registers, right ones in tiles; a product leaves its left operand for the next
// one in the registers that hold it.
//
// A tall matrix lies in memory as the transpose of X. Its tiles are kept as they come and read
// across; nothing is transposed.
#pragma once

#include <fastweights/shared.cuh>
#include <fastweights/wgmma.cuh>

#include "common.cuh"

namespace fastweights {

constexpr int kScratchBytes = 1024;  // for sums over the block; tiles start on a multiple of it

template <int kRowTiles, int kColTiles, bool kTall, int kGroups = kRowTiles>
struct Stack {
  using Compute = half;
  using Gram = Left[kRowTiles];  // a warpgroup's rows of a rows × rows matrix
  static constexpr int kThreads = 128 * kGroups;
  static constexpr int kOwn = kRowTiles / kGroups;
  static constexpr int kBytes = kRowTiles * kColTiles * Tile::kBytes;  // of X
  static constexpr int kGramBytes = kRowTiles * kRowTiles * Tile::kBytes;
  static constexpr int kPieces = kRowTiles * kColTiles * 64 * 8 / kThreads;  // of a thread
  static constexpr int kAcross = kTall ? kRowTiles : kColTiles;  // tiles side by side in memory
  // How X lies for X·Xᵀ, which takes both operands from it, and for B·X.
  static constexpr Major kGram = kTall ? Major::kAcross : Major::kAlongK;
  static constexpr Major kUpdate = kTall ? Major::kAlongK : Major::kAcross;

  int group = threadIdx.x / 128;
  int warp = threadIdx.x / 32 % 4;
  int lane = threadIdx.x % 32;

  template <typename Tiles>
  __device__ __forceinline__ static Tiles tile(Tiles x, int r, int c) {
    return x + (kTall ? c * kRowTiles + r : r * kColTiles + c) * Tile::kBytes;
  }
  template <typename Tiles>
  __device__ __forceinline__ static Tiles gram_tile(Tiles a, int r, int c) {
    return a + (r * kRowTiles + c) * Tile::kBytes;
  }

  // The index-th tile of X that this warpgroup owns: column after column.
  __device__ __forceinline__ u32 own_tile(u32 x, int index) const {
    return tile(x, kOwn * group + index % kOwn, index / kOwn);
  }

  // A thread's i-th piece of eight numbers: its row and first column in memory, its address.
  __device__ __forceinline__ static int piece_row(int i) {
    return (threadIdx.x + i * kThreads) / (8 * kAcross);
  }
  __device__ __forceinline__ static int piece_col(int i) {
    return (threadIdx.x + i * kThreads) % (8 * kAcross) * 8;
  }
  __device__ __forceinline__ static u32 piece_address(u32 x, int i) {
    const int row = piece_row(i), piece = piece_col(i) / 8;
    return x + (row / 64 * kAcross + piece / 8) * Tile::kBytes + Tile::piece(row % 64, piece % 8);
  }

  // The matrix at `source` times scale/(its norm + eps), into tiles; returns its norm. The barrier
  // in the sum also parts the new tiles from what was done with the old ones.
  template <typename T>
  __device__ __forceinline__ float load(u32 x, const T* source, int rows, int cols, bool whole,
                                        float scale, float eps, float* scratch) const {
    // A large one is read twice: it would not stay in registers.
    constexpr bool kKeep = kPieces <= 8;
    constexpr int kAtOnce = kKeep ? kPieces : 4;
    u32 pieces[kAtOnce][4];
    float square = 0.0f;
#pragma unroll 1
    for (int first = 0; first < kPieces; first += kAtOnce) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int piece = first + i;
        load_words<4>(source, piece_row(piece), piece_col(piece), rows, cols, whole, pieces[i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float low, high;
          unpack<T>(pieces[i][j], low, high);
          square += low * low + high * high;
        }
      }
    }
    const float norm = sqrtf(block_sum(square, scratch));
    const float factor = norm > 0.0f ? scale / (norm + eps) : 0.0f;
#pragma unroll 1
    for (int first = 0; first < kPieces; first += kAtOnce) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int piece = first + i;
        if constexpr (!kKeep) {
          load_words<4>(source, piece_row(piece), piece_col(piece), rows, cols, whole, pieces[i]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float low, high;
          unpack<T>(pieces[i][j], low, high);
          pieces[i][j] = pack<Compute>(low * factor, high * factor);
        }
        store_shared(piece_address(x, piece), pieces[i]);
      }
    }
    return norm;
  }

  // The tiles times `factor` to memory.
  template <typename T>
  __device__ __forceinline__ void unload(u32 x, T* target, int rows, int cols, bool whole,
                                         float factor) const {
#pragma unroll 4
    for (int i = 0; i < kPieces; ++i) {
      u32 piece[4];
      load_shared(piece_address(x, i), piece);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float low, high;
        unpack<Compute>(piece[j], low, high);
        piece[j] = pack<T>(factor * low, factor * high);
      }
      store_words<4>(target, piece_row(i), piece_col(i), rows, cols, whole, piece);
    }
  }

  // The index-th tile that this warpgroup owns of a matrix that is kept in global memory, kBytes of
  // it. A thread reads back what it wrote itself, so that its own order of stores and loads is all
  // the order that this needs.
  __device__ __forceinline__ static void keep(uint4* kept, int index, const Left& rows) {
    uint4* const own = kept + 4 * index * kThreads + threadIdx.x;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      own[s * kThreads] = make_uint4(rows.x[s][0], rows.x[s][1], rows.x[s][2], rows.x[s][3]);
    }
  }
  __device__ __forceinline__ static void recall(const uint4* kept, int index, Left& rows) {
    const uint4* const own = kept + 4 * index * kThreads + threadIdx.x;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const uint4 piece = own[s * kThreads];
      rows.x[s][0] = piece.x;
      rows.x[s][1] = piece.y;
      rows.x[s][2] = piece.z;
      rows.x[s][3] = piece.w;
    }
  }

  // Such a tile to its place in X.
  __device__ __forceinline__ void put(u32 x, int index, const Left& rows) const {
    store_left<kTall>(own_tile(x, index), rows, warp, lane);
  }

  // All of them, out of X and back.
  __device__ __forceinline__ void keep(u32 x, uint4* kept) const {
#pragma unroll 2
    for (int i = 0; i < kOwn * kColTiles; ++i) {
      Left rows;
      load_left<kTall>(own_tile(x, i), rows, warp, lane);
      keep(kept, i, rows);
    }
  }
  __device__ __forceinline__ void recall(u32 x, const uint4* kept) const {
    Left rows[kColTiles];
#pragma unroll 1
    for (int first = 0; first < kOwn * kColTiles; first += kColTiles) {
#pragma unroll
      for (int i = 0; i < kColTiles; ++i) {
        recall(kept, first + i, rows[i]);
      }
#pragma unroll
      for (int i = 0; i < kColTiles; ++i) {
        put(x, first + i, rows[i]);
      }
    }
  }

  // Sum over the block; `scratch` holds a float a warp.
  __device__ __forceinline__ static float block_sum(float x, float* scratch) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      x += __shfl_xor_sync(0xffffffffu, x, offset);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
      scratch[threadIdx.x / 32] = x;
    }
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) {
      sum += scratch[i];
    }
    return sum;
  }

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
        multiply<Compute, kGram, kGram>(sum[0], tile(TileName(x), group, k),
                                        tile(TileName(y), r, k), k > 0);
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

  // a ← p·a + q·(transpose of what lies in the tiles).
  __device__ __forceinline__ void add_transposed(Gram& a, float p, u32 tiles, float q) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      Left other;
      load_left<true>(gram_tile(tiles, r, group), other, warp, lane);
      combine(a[r], p, a[r], q, other);
    }
  }

  __device__ __forceinline__ static void combine(Left& out, float p, const Left& x, float q,
                                                 const Left& y) {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x0, x1, y0, y1;
        unpack<Compute>(x.x[s][i], x0, x1);
        unpack<Compute>(y.x[s][i], y0, y1);
        out.x[s][i] = pack<Compute>(p * x0 + q * y0, p * x1 + q * y1);
      }
    }
  }

  // Column tile r of left·right, right a rows × rows matrix in tiles.
  __device__ __forceinline__ void square_product(const Gram& left, u32 right, int r,
                                                 Accumulator (&sum)[1]) const {
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kRowTiles; ++k) {
      multiply<Compute, Major::kAcross>(sum[0], left[k], gram_tile(TileName(right), k, r), k > 0);
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

  // This warpgroup's part of column tile k of a·x, in fp32.
  __device__ __forceinline__ void scaled(u32 x, int k, float a, Accumulator& out) const {
    Left own;
    load_left<kTall>(tile(x, group, k), own, warp, lane);
    widen<Compute>(own, a, out);
  }

  // Start out += left·(column tile k of x).
  __device__ __forceinline__ void apply(const Gram& left, u32 x, int k, Accumulator& out) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      multiply<Compute, kUpdate>(out, left[r], tile(TileName(x), r, k), true);
    }
  }
};

}  // namespace fastweights
