// csrc/include/fastweights/global.cuh on the host.
#pragma once

#include "../cuda.hpp"

#include <fastweights/types.cuh>

namespace fastweights {

template <int kWords>
void store_global(void* address, const u32 (&x)[kWords]) {
  std::memcpy(address, x, sizeof(x));
}

}  // namespace fastweights
