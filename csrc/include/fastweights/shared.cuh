// Shared memory: addresses, barriers between the warps of a group, the 128-byte swizzle, and moving
// fragments of matrices between it and registers.
#pragma once

#include <fastweights/numbers.cuh>

namespace fastweights {

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// What generic stores wrote becomes visible to the asynchronous units (wgmma, bulk copies).
__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void store_shared(u32 address, u32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void store_shared(u32 address, const u32 (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

__device__ __forceinline__ void load_shared(u32 address, u32 (&x)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

// Barrier number `id` of kThreads threads, whole warps, that they may reach in different places.
template <int kThreads>
__device__ __forceinline__ void sync_anywhere(int id) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// threadIdx.x, asked for anew at each call: what follows from it is worked out where it is used,
// and waits in no register across a loop that has none to spare.
__device__ __forceinline__ int fresh_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// One word, read anew at each call.
__device__ __forceinline__ u32 load_word(u32 address) {
  u32 x;
  asm volatile("ld.volatile.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

// Four 8 × 8 matrices of 16-bit numbers; thread t gives the address of row t % 8 of matrix t / 8,
// and holds two neighbours of row t / 4 of each (of column t / 4, if transposed).
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(u32 address, u32 (&x)[4]) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
  }
}

template <bool kTransposed>
__device__ __forceinline__ void store_matrices(u32 address, const u32 (&x)[4]) {
  if constexpr (kTransposed) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
        : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
  }
}

}  // namespace fastweights
