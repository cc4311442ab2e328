// What needs no instruction of the GPU: numbers, and where a tile has them.
#pragma once

namespace fastweights {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct half {
  u16 bits;
};
struct bfloat16 {
  u16 bits;
};

// A tile of 64 × 64 16-bit numbers: rows of 128 bytes, in which the eight pieces of 16 bytes change
// places from row to row, so that a column of pieces lies in all banks. wgmma calls it a 128-byte
// swizzle, and wants it on a multiple of 1024 bytes.
struct Tile {
  static constexpr int kRows = 64;
  static constexpr int kCols = 64;
  static constexpr int kBytes = kRows * kCols * 2;

  // Byte of the 16-byte piece that holds columns 8·piece … 8·piece + 7 of a row.
  __device__ __forceinline__ static u32 piece(int row, int piece) {
    return row * 128 + ((piece ^ (row & 7)) << 4);
  }
};

}  // namespace fastweights
