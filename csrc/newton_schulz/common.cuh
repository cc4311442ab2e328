// What the Newton–Schulz kernels share: their coefficients, and rows of matrices in and out.
#pragma once

#include <fastweights/global.cuh>
#include <fastweights/numbers.cuh>

namespace fastweights {

constexpr int kMaxSteps = 16;

struct Coefficients {
  float of_step[kMaxSteps][3];
};

// Calls f(Index<0>{}) … f(Index<kCount − 1>{}).
template <int kIndex>
struct Index {
  static constexpr int value = kIndex;
};
template <int kCount, int kFrom = 0, typename F>
__device__ __forceinline__ void repeat(F&& f) {
  if constexpr (kFrom < kCount) {
    f(Index<kFrom>{});
    repeat<kCount, kFrom + 1>(f);
  }
}

// 2·kWords neighbours of a row from `col` on, zeros past the matrix. `whole`: all neighbours are in
// the matrix or none is, and their address is a multiple of their size.
template <int kWords, typename T>
__device__ __forceinline__ void load_words(const T* matrix, int row, int col, int rows, int cols,
                                           bool whole, u32 (&words)[kWords]) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    words[i] = 0;
  }
  if (row >= rows || col >= cols) {
    return;
  }
  const T* at = matrix + (long long)row * cols + col;
  if (whole) {
    load_global(at, words);
    return;
  }
#pragma unroll
  for (int i = 0; i < 2 * kWords; ++i) {
    if (col + i < cols) {
      words[i / 2] |= u32(at[i].bits) << (16 * (i % 2));
    }
  }
}

template <int kWords, typename T>
__device__ __forceinline__ void store_words(T* matrix, int row, int col, int rows, int cols,
                                            bool whole, const u32 (&words)[kWords]) {
  if (row >= rows || col >= cols) {
    return;
  }
  T* at = matrix + (long long)row * cols + col;
  if (whole) {
    store_global(at, words);
    return;
  }
#pragma unroll
  for (int i = 0; i < 2 * kWords; ++i) {
    if (col + i < cols) {
      at[i].bits = u16(words[i / 2] >> (16 * (i % 2)));
    }
  }
}

}  // namespace fastweights
