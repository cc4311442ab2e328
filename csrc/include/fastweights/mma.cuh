// mma.sync (sm_80 and later): the matrix product of a warp, 16 × 8 × 16 numbers at a time.
#pragma once

#include <fastweights/numbers.cuh>

namespace fastweights {

// d += a·b. With g = lane / 4 and t = lane % 4, a thread holds, two numbers a register:
//   a: rows g, g + 8, g, g + 8 at columns 2t, 2t, 2t + 8, 2t + 8 and the next ones
//   b: column g, at rows 2t, 2t + 8 and the next ones
//   d: row g at columns 2t, 2t + 1, then row g + 8 at the same
// So d, rounded to 16 bits, is half of an a; and what a holds of rows g (or g + 8) is the b of its
// transpose: where that is the same matrix, nothing moves between threads.
__device__ __forceinline__ void mma_step(half, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_step(bfloat16, float (&d)[4], const u32 (&a)[4], u32 b0,
                                         u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The transpose of an 8 × 8 matrix that the warp holds, two neighbours of a row a thread.
__device__ __forceinline__ u32 transpose(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

}  // namespace fastweights
