// As much of CUDA as the kernels of csrc use, on the threads of the host: one block, a host thread
// for each of its threads, barriers of pthread. Slow, and exact about who reads what when.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __restrict__
#define __grid_constant__
#define __align__(bytes)
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Dim {
  unsigned x = 0, y = 0, z = 0;
};
inline thread_local Dim threadIdx;
inline Dim blockIdx, blockDim, gridDim{1, 1, 1};

struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) {
  return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
template <typename T>
inline T __ldg(const T* at) {
  return *at;
}
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline int min(int a, int b) {
  return a < b ? a : b;
}

// Barriers of the block, of its warpgroups and of its warps, and those that have a number.
struct Barriers {
  pthread_barrier_t block, group[8], warp[32];
  std::mutex mutex;
  std::map<int, pthread_barrier_t> by_number;

  explicit Barriers(int threads) {
    pthread_barrier_init(&block, nullptr, threads);
    for (auto& barrier : group) {
      pthread_barrier_init(&barrier, nullptr, 128);
    }
    for (auto& barrier : warp) {
      pthread_barrier_init(&barrier, nullptr, 32);
    }
  }

  pthread_barrier_t* numbered(int id, int threads) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto [at, is_new] = by_number.try_emplace(id);
    if (is_new) {
      pthread_barrier_init(&at->second, nullptr, threads);
    }
    return &at->second;
  }
};
inline Barriers* barriers;

inline int warp_of_block() {
  return threadIdx.x / 32;
}
inline int lane_of_warp() {
  return threadIdx.x % 32;
}
inline void __syncthreads() {
  pthread_barrier_wait(&barriers->block);
}
inline void sync_group() {
  pthread_barrier_wait(&barriers->group[threadIdx.x / 128]);
}
inline void sync_warp() {
  pthread_barrier_wait(&barriers->warp[warp_of_block()]);
}

// What each thread of a warp says, told to all of it. Who calls it syncs the warp when it has read.
template <typename T>
struct Exchange {
  T said[1024];

  const T* operator()(const T& mine) {
    said[threadIdx.x] = mine;
    sync_warp();
    return said + 32 * warp_of_block();
  }
};

inline float __shfl_xor_sync(unsigned, float x, int mask) {
  static Exchange<float> exchange;
  const float other = exchange(x)[lane_of_warp() ^ mask];
  sync_warp();
  return other;
}

// Run kernel() in every thread of one block.
template <typename Kernel>
void run_block(int threads, Kernel kernel) {
  Barriers mine(threads);
  barriers = &mine;
  blockDim.x = threads;
  std::vector<std::thread> all;
  for (int i = 0; i < threads; ++i) {
    all.emplace_back([&kernel, i] {
      threadIdx.x = i;
      kernel();
    });
  }
  for (auto& thread : all) {
    thread.join();
  }
}
