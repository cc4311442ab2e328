// csrc/include/fastweights/wgmma.cuh on the host: a product is through when it is called.
#pragma once

#include <fastweights/warpgroup.cuh>

namespace fastweights {

struct TileName {
  u32 address;

  explicit TileName(u32 address) : address(address) {}
  TileName operator+(u32 bytes) const { return TileName(address + bytes); }
};

inline void wgmma_begin() {}
inline void wgmma_commit() {}
template <int kPending>
void wgmma_wait(Accumulator&) {}
template <int kPending, int kCount>
void wgmma_wait(Accumulator (&)[kCount]) {}

// d (+)= left(row, k)·right(k, column) over 64 k, this thread's numbers of it.
template <typename T, typename LeftAt, typename RightAt>
void sum_products(Accumulator& d, bool accumulate, LeftAt left, RightAt right) {
  const int warp = warp_of_block() % 4, lane = lane_of_warp();
  for (int i = 0; i < 32; ++i) {
    const int r = 16 * warp + lane / 4 + 8 * (i % 4 / 2);
    const int c = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    float sum = accumulate ? d.x[i] : 0.0f;
    for (int k = 0; k < 64; ++k) {
      sum += widened(T{left(r, k)}) * widened(T{right(k, c)});
    }
    d.x[i] = sum;
  }
  sync_group();
}

template <Major kMajor>
u16 right_at(TileName tile, int k, int c) {
  return kMajor == Major::kAcross ? number_at(tile.address, k, c) : number_at(tile.address, c, k);
}

template <typename T, Major kB>
void multiply(Accumulator& d, const Left& a, TileName b, bool accumulate) {
  static u16 rows[8][64][64];  // a of each warpgroup
  auto& mine = rows[threadIdx.x / 128];
  const int warp = warp_of_block() % 4, lane = lane_of_warp();
  sync_group();
  for (int step = 0; step < 4; ++step) {
    for (int i = 0; i < 8; ++i) {
      const int r = 16 * warp + lane / 4 + 8 * (i / 2 % 2);
      const int c = 16 * step + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      mine[r][c] = word(a.x[step][i / 2], i % 2);
    }
  }
  sync_group();
  sum_products<T>(
      d, accumulate, [&](int r, int k) { return mine[r][k]; },
      [&](int k, int c) { return right_at<kB>(b, k, c); });
}

template <typename T, Major kA, Major kB>
void multiply(Accumulator& d, TileName a, TileName b, bool accumulate) {
  sync_group();
  sum_products<T>(
      d, accumulate,
      [&](int r, int k) {
        return kA == Major::kAlongK ? number_at(a.address, r, k) : number_at(a.address, k, r);
      },
      [&](int k, int c) { return right_at<kB>(b, k, c); });
}

}  // namespace fastweights
