// csrc/include/fastweights/shared.cuh on the host.
#pragma once

#include <utility>

#include "numbers.cuh"

namespace fastweights {

alignas(1024) inline unsigned char memory[256 * 1024];

inline u32 shared_address(const void* pointer) {
  return u32(static_cast<const unsigned char*>(pointer) - memory);
}
inline void fence_async() {}

// The number of a tile in row r and column c.
inline u16 number_at(u32 tile, int r, int c) {
  u16 bits;
  std::memcpy(&bits, memory + tile + Tile::piece(r, c / 8) + c % 8 * 2, 2);
  return bits;
}

inline void store_shared(u32 address, u32 x) {
  std::memcpy(memory + address, &x, 4);
}
inline void store_shared(u32 address, const u32 (&x)[4]) {
  std::memcpy(memory + address, x, 16);
}
inline void load_shared(u32 address, u32 (&x)[4]) {
  std::memcpy(x, memory + address, 16);
}
template <int kThreads>
void sync_anywhere(int id) {
  pthread_barrier_wait(barriers->numbered(id, kThreads));
}
inline int fresh_thread() {
  return threadIdx.x;
}
inline u32 load_word(u32 address) {
  u32 x;
  std::memcpy(&x, memory + address, 4);
  return x;
}

// Row and column in its 8 × 8 matrix of the `which`-th number that a thread holds.
template <bool kTransposed>
std::pair<int, int> place(int which) {
  const int r = lane_of_warp() / 4, c = 2 * (lane_of_warp() % 4) + which;
  return kTransposed ? std::pair{c, r} : std::pair{r, c};
}

template <bool kTransposed>
void load_matrices(u32 address, u32 (&x)[4]) {
  static Exchange<u32> rows;
  const u32* row = rows(address);
  for (int i = 0; i < 4; ++i) {
    x[i] = 0;
    for (int which = 0; which < 2; ++which) {
      const auto [r, c] = place<kTransposed>(which);
      u16 bits;
      std::memcpy(&bits, memory + row[8 * i + r] + 2 * c, 2);
      x[i] |= u32(bits) << (16 * which);
    }
  }
  sync_warp();
}

template <bool kTransposed>
void store_matrices(u32 address, const u32 (&x)[4]) {
  static Exchange<u32> rows;
  const u32* row = rows(address);
  for (int i = 0; i < 4; ++i) {
    for (int which = 0; which < 2; ++which) {
      const auto [r, c] = place<kTransposed>(which);
      const u16 bits = word(x[i], which);
      std::memcpy(memory + row[8 * i + r] + 2 * c, &bits, 2);
    }
  }
  sync_warp();
}

}  // namespace fastweights
