// csrc/include/fastweights/mma.cuh on the host.
#pragma once

#include <fastweights/shared.cuh>

namespace fastweights {

template <typename T>
void mma_step(T, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  struct Operands {
    u32 a[4], b[2];
  };
  static Exchange<Operands> exchange;
  const Operands* all = exchange({{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int lane = lane_of_warp();
  for (int i = 0; i < 4; ++i) {
    const int r = lane / 4 + 8 * (i / 2), c = 2 * (lane % 4) + i % 2;
    for (int k = 0; k < 16; ++k) {
      const u32 left = all[r % 8 * 4 + k % 8 / 2].a[r / 8 + 2 * (k / 8)];
      const u32 right = all[c * 4 + k % 8 / 2].b[k / 8];
      d[i] += widened(T{word(left, k % 2)}) * widened(T{word(right, k % 2)});
    }
  }
  sync_warp();
}

inline u32 transpose(u32 x) {
  static Exchange<u32> exchange;
  const u32* all = exchange(x);
  u32 y = 0;
  for (int which = 0; which < 2; ++which) {
    const auto [r, c] = place<true>(which);
    y |= u32(word(all[r * 4 + c / 2], c % 2)) << (16 * which);
  }
  sync_warp();
  return y;
}

}  // namespace fastweights
