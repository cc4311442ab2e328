// Global memory: stores of neighbours at once. The compiler splits some that are written as stores
// of a vector type.
#pragma once

#include <fastweights/types.cuh>

namespace fastweights {

__device__ __forceinline__ void store_global(void* address, const u32 (&x)[2]) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(x[0]), "r"(x[1]) : "memory");
}
__device__ __forceinline__ void store_global(void* address, const u32 (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

}  // namespace fastweights
