// A matrix of a stack in shared memory, and what every kernel over it does alike.
//
// X is the wide form (rows ≤ cols) in kRowTiles × kColTiles tiles of 64 × 64. Four warps, a group,
// own kOwn rows of tiles of X and of all that has X's rows, 16 rows each.
//
// A tall matrix lies in memory as the transpose of X. Its tiles are kept as they come and read
// across; nothing is transposed.
#pragma once

#include <fastweights/warpgroup.cuh>

#include "common.cuh"

namespace fastweights {

constexpr int kScratchBytes = 1024;  // for sums over the block; tiles start on a multiple of it

// out ← b·A + c·sum, and a·I where the tile lies on the diagonal, by way of `sum`.
template <typename T>
__device__ __forceinline__ void round_polynomial(const float (&f)[3], const Left& gram,
                                                 Accumulator& sum, bool on_diagonal,
                                                 const Diagonal& diagonal, int warp, Left& out) {
  blend<T>(gram, f[1], f[2], sum);
  if (on_diagonal) {
    diagonal.add(sum, f[0], warp);
  }
  round_to_left<T>(sum, out);
}

template <int kRowTiles, int kColTiles, bool kTall, int kGroups = kRowTiles>
struct StackTiles {
  using Compute = half;
  using Gram = Left[kRowTiles];  // a group's rows of a rows × rows matrix
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

  // The index-th tile of X that this group owns: column after column.
  __device__ __forceinline__ u32 own_tile(u32 x, int index) const {
    return tile(x, kOwn * group + index % kOwn, index / kOwn);
  }

  // A thread's i-th piece of eight numbers: its row and first column in memory, its address.
  struct Pieces {
    int thread = fresh_thread() & (kThreads - 1);  // of which the compiler knows the size then

    __device__ __forceinline__ int row(int i) const {
      return (thread + i * kThreads) / (8 * kAcross);
    }
    __device__ __forceinline__ int col(int i) const {
      return (thread + i * kThreads) % (8 * kAcross) * 8;
    }
    __device__ __forceinline__ u32 address(u32 x, int i) const {
      const int r = row(i), piece = col(i) / 8;
      return x + (r / 64 * kAcross + piece / 8) * Tile::kBytes + Tile::piece(r % 64, piece % 8);
    }
  };

  // Whether the matrix fills the tiles, so that its pieces lie one behind the other.
  __device__ __forceinline__ static bool fills(int rows, int cols, bool whole) {
    constexpr int kDown = kTall ? kColTiles : kRowTiles;
    return whole && rows == 64 * kDown && cols == 64 * kAcross;
  }

  // The matrix at `source` times scale/(its norm + eps), into tiles; returns its norm. kAnySize:
  // its square need not be a number that fp32 has. The barriers in the sum also part the new tiles
  // from what was done with the old ones.
  template <bool kAnySize, typename T>
  __device__ __forceinline__ float load(u32 x, const T* source, int rows, int cols, bool whole,
                                        float scale, float eps, float* scratch) const {
    // A large one is read anew each time: it would not stay in registers.
    constexpr bool kKeep = kPieces <= (kThreads < 512 ? 16 : 8);
    constexpr int kAtOnce = kKeep ? kPieces : 4;
    const Pieces at;
    u32 pieces[kAtOnce][4];
    const bool full = fills(rows, cols, whole);
    auto read = [&](int first) {
      if (full) {
        const T* const own = source + 8 * (at.thread + first * kThreads);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          load_global(own + 8 * i * kThreads, pieces[i]);
        }
        return;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        load_words<4>(source, at.row(first + i), at.col(first + i), rows, cols, whole, pieces[i]);
      }
    };
    // Of each two numbers that a thread has.
    auto visit = [&](auto&& f) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float low, high;
          unpack<T>(pieces[i][j], low, high);
          f(low, high, pieces[i][j]);
        }
      }
    };
    float unit = 1.0f;
    if constexpr (kAnySize) {
      float largest = 0.0f;
#pragma unroll 1
      for (int first = 0; first < kPieces; first += kAtOnce) {
        read(first);
        visit([&](float low, float high, u32&) {
          largest = fmaxf(largest, fmaxf(fabsf(low), fabsf(high)));
        });
      }
      unit = power_to_one(block_max(largest, scratch));
    }
    float square = 0.0f;
#pragma unroll 1
    for (int first = 0; first < kPieces; first += kAtOnce) {
      if constexpr (!kKeep || !kAnySize) {
        read(first);
      }
      visit([&](float low, float high, u32&) {
        if constexpr (kAnySize) {
          low *= unit, high *= unit;
        }
        square += low * low + high * high;
      });
    }
    const float norm = sqrtf(block_sum(square, scratch));  // of the matrix times `unit`
    const float factor = norm == 0.0f ? 0.0f : scale / (norm + eps) * unit;
#pragma unroll 1
    for (int first = 0; first < kPieces; first += kAtOnce) {
      if constexpr (!kKeep) {
        read(first);
      }
      visit([&](float low, float high, u32& both) {
        both = pack<Compute>(low * factor, high * factor);
      });
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        store_shared(at.address(x, first + i), pieces[i]);
      }
    }
    return norm / unit;
  }

  // The tiles times `factor` to memory.
  template <typename T>
  __device__ __forceinline__ void unload(u32 x, T* target, int rows, int cols, bool whole,
                                         float factor = 1.0f) const {
    const Pieces at;
    const bool full = fills(rows, cols, whole);
#pragma unroll 4
    for (int i = 0; i < kPieces; ++i) {
      u32 piece[4];
      load_shared(at.address(x, i), piece);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float low, high;
        unpack<Compute>(piece[j], low, high);
        piece[j] = pack<T>(factor * low, factor * high);
      }
      if (full) {
        store_global(target + 8 * (at.thread + i * kThreads), piece);
      } else {
        store_words<4>(target, at.row(i), at.col(i), rows, cols, whole, piece);
      }
    }
  }

  // dX/(‖x‖ + ε) − X·⟨dX, X⟩/‖x‖ times `factor` to memory: the gradient through x/(‖x‖ + ε).
  template <typename T>
  __device__ __forceinline__ void unload_gradient(u32 d, u32 x, T* target, int rows, int cols,
                                                  bool whole, float factor, float norm, float eps,
                                                  float* scratch) const {
    const Pieces at;
    float along = 0.0f;
#pragma unroll 2
    for (int i = 0; i < kPieces; ++i) {
      u32 grads[4], values[4];
      load_shared(at.address(d, i), grads);
      load_shared(at.address(x, i), values);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float g0, g1, v0, v1;
        unpack<Compute>(grads[j], g0, g1);
        unpack<Compute>(values[j], v0, v1);
        along += g0 * v0 + g1 * v1;
      }
    }
    along = block_sum(along, scratch);
    const float p = norm == 0.0f ? 0.0f : factor / (norm + eps);
    const float q = norm == 0.0f ? 0.0f : -factor * along / norm;
#pragma unroll 2
    for (int i = 0; i < kPieces; ++i) {
      u32 grads[4], values[4];
      load_shared(at.address(d, i), grads);
      load_shared(at.address(x, i), values);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float g0, g1, v0, v1;
        unpack<Compute>(grads[j], g0, g1);
        unpack<Compute>(values[j], v0, v1);
        grads[j] = pack<T>(p * g0 + q * v0, p * g1 + q * v1);
      }
      store_words<4>(target, at.row(i), at.col(i), rows, cols, whole, grads);
    }
  }

  // The index-th tile that this group owns of a matrix that is kept in global memory, kBytes of
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

  // f(f(…), …) of all numbers of the block; `scratch` holds a float a warp.
  template <typename F>
  __device__ __forceinline__ static float reduce(float x, float* scratch, F&& f) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      x = f(x, __shfl_xor_sync(0xffffffffu, x, offset));
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
      scratch[threadIdx.x / 32] = x;
    }
    __syncthreads();
    x = scratch[0];
#pragma unroll
    for (int i = 1; i < kThreads / 32; ++i) {
      x = f(x, scratch[i]);
    }
    return x;
  }
  __device__ __forceinline__ static float block_sum(float x, float* scratch) {
    return reduce(x, scratch, [](float a, float b) { return a + b; });
  }
  __device__ __forceinline__ static float block_max(float x, float* scratch) {
    return reduce(x, scratch, [](float a, float b) { return fmaxf(a, b); });
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
};

}  // namespace fastweights
