// Global memory: neighbours at once. The compiler splits some accesses that are written as those of
// a vector type.
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

// What nobody writes while the kernel runs.
__device__ __forceinline__ void load_global(const void* address, u32 (&x)[2]) {
  asm("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "l"(address));
}
__device__ __forceinline__ void load_global(const void* address, u32 (&x)[4]) {
  asm("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
      : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
      : "l"(address));
}

}  // namespace fastweights
