// csrc/include/fastweights/numbers.cuh on the host.
#pragma once

#include <immintrin.h>

#include "../cuda.hpp"

#include <fastweights/types.cuh>

namespace fastweights {

template <typename T>
T rounded(float x);
template <>
inline half rounded<half>(float x) {
  return {u16(_cvtss_sh(x, 0))};
}
template <>
inline bfloat16 rounded<bfloat16>(float x) {
  u32 bits;
  std::memcpy(&bits, &x, 4);
  return {u16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
inline float widened(half x) {
  return _cvtsh_ss(x.bits);
}
inline float widened(bfloat16 x) {
  const u32 bits = u32(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

inline void stay(float&) {}
inline float power_to_one(float x) {
  return x == 0 ? std::ldexp(1.0f, 127) : std::ldexp(1.0f, -std::ilogb(x));
}

template <typename T>
u32 pack(float low, float high) {
  return rounded<T>(low).bits | u32(rounded<T>(high).bits) << 16;
}
template <typename T>
void unpack(u32 packed, float& low, float& high) {
  low = widened(T{u16(packed)});
  high = widened(T{u16(packed >> 16)});
}

// One of the two numbers of a register.
inline u16 word(u32 packed, int which) {
  return u16(packed >> (16 * which));
}

}  // namespace fastweights
