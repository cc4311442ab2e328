// 16-bit numbers as bit patterns: no CUDA header is needed for them, so a kernel compiles in
// hundredths of a second at run time.
#pragma once

#include <fastweights/types.cuh>

namespace fastweights {

// x stays in its register: what it came from is not worked out anew where it is used.
__device__ __forceinline__ void stay(float& x) {
  asm volatile("" : "+f"(x));
}

// The power of two that brings |x| to 1 … 2, as near as there is one; NaN and infinity stay.
__device__ __forceinline__ float power_to_one(float x) {
  const int exponent = (__float_as_uint(x) >> 23) & 255;
  return __uint_as_float(u32(max(1, 254 - exponent)) << 23);
}

// Two numbers in one register, the first in the low half.
template <typename T>
__device__ __forceinline__ u32 pack(float low, float high);
template <>
__device__ __forceinline__ u32 pack<half>(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
template <>
__device__ __forceinline__ u32 pack<bfloat16>(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <typename T>
__device__ __forceinline__ void unpack(u32 packed, float& low, float& high);
template <>
__device__ __forceinline__ void unpack<half>(u32 packed, float& low, float& high) {
  asm("{ .reg .b16 a, b;\n"
      "mov.b32 {a, b}, %2;\n"
      "cvt.f32.f16 %0, a;\n"
      "cvt.f32.f16 %1, b; }"
      : "=f"(low), "=f"(high)
      : "r"(packed));
}
template <>
__device__ __forceinline__ void unpack<bfloat16>(u32 packed, float& low, float& high) {
  low = __uint_as_float(packed << 16);
  high = __uint_as_float(packed & 0xffff0000u);
}

}  // namespace fastweights
