// wgmma (sm_90a): the matrix product of a warpgroup, 64 × 64 × 16 numbers at a time.
#pragma once

#include <fastweights/warpgroup.cuh>

namespace fastweights {

// Descriptor of a swizzled tile (see Tile) at a shared address. All of our tiles are one swizzle
// atom wide, so that only the stride between piles of eight rows, 1024 bytes, is read.
__device__ __forceinline__ u64 tile_descriptor(u32 address) {
  constexpr u64 kSwizzle128 = u64(1) << 62;
  constexpr u64 kPile = u64(1024 >> 4) << 32;
  constexpr u64 kUnread = u64(1) << 16;
  return kSwizzle128 | kPile | kUnread | ((address & 0x3ffff) >> 4);
}

// A tile as wgmma names it. Tiles at fixed distances from one that is named cost an addition where
// they are used; each named by its own address would want registers.
struct TileName {
  u64 descriptor;

  __device__ __forceinline__ explicit TileName(u32 address)
      : descriptor(tile_descriptor(address)) {}
  __device__ __forceinline__ TileName operator+(u32 bytes) const {
    TileName moved = *this;
    moved.descriptor += bytes >> 4;
    return moved;
  }
};

// 16 further k: 32 bytes along a row, or 16 rows of 128 bytes.
template <Major kMajor>
__device__ __forceinline__ u64 step_descriptor(u64 tile, int step) {
  return tile + step * (kMajor == Major::kAlongK ? 32 >> 4 : 16 * 128 >> 4);
}

__device__ __forceinline__ void wgmma_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait until at most kPending groups run. The accumulators are named, so that no use of them moves
// before the wait.
__device__ __forceinline__ void name(Accumulator& d) {
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    asm volatile("" : "+f"(d.x[j])::"memory");
  }
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait(Accumulator& d) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  name(d);
}
template <int kPending, int kCount>
__device__ __forceinline__ void wgmma_wait(Accumulator (&d)[kCount]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    name(d[i]);
  }
}

#define FASTWEIGHTS_WGMMA_D                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define FASTWEIGHTS_WGMMA(name, accumulate, operands)                                 \
  "{ .reg .pred p; setp.ne.b32 p, " accumulate                                        \
  ", 0;\n"                                                                            \
  "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " " FASTWEIGHTS_WGMMA_D \
  ", " operands "; }"
#define FASTWEIGHTS_FOUR(how, d, i) how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3])
#define FASTWEIGHTS_OUT(how, d)                                                                 \
  FASTWEIGHTS_FOUR(how, d, 0), FASTWEIGHTS_FOUR(how, d, 4), FASTWEIGHTS_FOUR(how, d, 8),        \
      FASTWEIGHTS_FOUR(how, d, 12), FASTWEIGHTS_FOUR(how, d, 16), FASTWEIGHTS_FOUR(how, d, 20), \
      FASTWEIGHTS_FOUR(how, d, 24), FASTWEIGHTS_FOUR(how, d, 28)

// d = a·b (accumulate: d + a·b) over 16 k, a in registers; `accumulate` is known to the compiler.
//
// The form that starts a sum does not name d as an input. ptxas 13.0 takes two sums that start from
// registers nobody has set for one and the same, and drops the first.
#define FASTWEIGHTS_WGMMA_REGISTERS(type, name)                                             \
  template <Major kB>                                                                       \
  __device__ __forceinline__ void wgmma_step(type, float (&d)[32], const u32(&a)[4], u64 b, \
                                             bool accumulate) {                             \
    if (accumulate) {                                                                       \
      asm volatile(FASTWEIGHTS_WGMMA(name, "1", "{%32, %33, %34, %35}, %36, p, 1, 1, %37")  \
                   : FASTWEIGHTS_OUT("+f", d)                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(kB)));     \
    } else {                                                                                \
      asm volatile(FASTWEIGHTS_WGMMA(name, "0", "{%32, %33, %34, %35}, %36, p, 1, 1, %37")  \
                   : FASTWEIGHTS_OUT("=f", d)                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(kB)));     \
    }                                                                                       \
  }
// The same, a in shared memory.
#define FASTWEIGHTS_WGMMA_SHARED(type, name)                                     \
  template <Major kA, Major kB>                                                  \
  __device__ __forceinline__ void wgmma_step(type, float (&d)[32], u64 a, u64 b, \
                                             bool accumulate) {                  \
    if (accumulate) {                                                            \
      asm volatile(FASTWEIGHTS_WGMMA(name, "1", "%32, %33, p, 1, 1, %34, %35")   \
                   : FASTWEIGHTS_OUT("+f", d)                                    \
                   : "l"(a), "l"(b), "n"(int(kA)), "n"(int(kB)));                \
    } else {                                                                     \
      asm volatile(FASTWEIGHTS_WGMMA(name, "0", "%32, %33, p, 1, 1, %34, %35")   \
                   : FASTWEIGHTS_OUT("=f", d)                                    \
                   : "l"(a), "l"(b), "n"(int(kA)), "n"(int(kB)));                \
    }                                                                            \
  }
FASTWEIGHTS_WGMMA_REGISTERS(half, "f16")
FASTWEIGHTS_WGMMA_REGISTERS(bfloat16, "bf16")
FASTWEIGHTS_WGMMA_SHARED(half, "f16")
FASTWEIGHTS_WGMMA_SHARED(bfloat16, "bf16")
#undef FASTWEIGHTS_WGMMA_REGISTERS
#undef FASTWEIGHTS_WGMMA_SHARED
#undef FASTWEIGHTS_WGMMA
#undef FASTWEIGHTS_WGMMA_D
#undef FASTWEIGHTS_FOUR
#undef FASTWEIGHTS_OUT

// d (+)= a·b over 64 k; b is a tile in shared memory, and a may be one.
template <typename T, Major kB>
__device__ __forceinline__ void multiply(Accumulator& d, const Left& a, TileName b,
                                         bool accumulate) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    wgmma_step<kB>(T{}, d.x, a.x[step], step_descriptor<kB>(b.descriptor, step),
                   accumulate || step > 0);
  }
}

template <typename T, Major kA, Major kB>
__device__ __forceinline__ void multiply(Accumulator& d, TileName a, TileName b, bool accumulate) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    wgmma_step<kA, kB>(T{}, d.x, step_descriptor<kA>(a.descriptor, step),
                       step_descriptor<kB>(b.descriptor, step), accumulate || step > 0);
  }
}

}  // namespace fastweights
