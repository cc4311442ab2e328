// csrc/include/fastweights/global.cuh on the host.
#pragma once

#include "../cuda.hpp"

#include <fastweights/types.cuh>

namespace fastweights {

template <int kWords>
void store_global(void* address, const u32 (&x)[kWords]) {
  std::memcpy(address, x, sizeof(x));
}

template <int kWords>
void load_global(const void* address, u32 (&x)[kWords]) {
  std::memcpy(x, address, sizeof(x));
}

}  // namespace fastweights
