// Every instance of the Newton–Schulz kernels that a call can ask for, for ahead-of-time builds.
#include "newton_schulz_256_backward_sm90.cuh"
#include "newton_schulz_256_sm90.cuh"
#include "newton_schulz_sm80.cuh"
#include "newton_schulz_sm90.cuh"
#include "newton_schulz_stack_sm80.cuh"
#include "newton_schulz_wide_sm90.cuh"

namespace fastweights {

// A kernel is compiled where its address is taken, whatever its arguments are.
#define ADDRESS(...) reinterpret_cast<const void*>(&__VA_ARGS__),

#define SMALL(kernel, type) \
  ADDRESS(kernel<1, type>)  \
  ADDRESS(kernel<2, type>)

// All tiles of 64 × 64 that a stack can have, wide and tall.
#define STACK_TALL(kernel, type, tall) \
  ADDRESS(kernel<1, 1, tall, type>)    \
  ADDRESS(kernel<1, 2, tall, type>)    \
  ADDRESS(kernel<1, 3, tall, type>)    \
  ADDRESS(kernel<1, 4, tall, type>)    \
  ADDRESS(kernel<2, 2, tall, type>)    \
  ADDRESS(kernel<2, 3, tall, type>)    \
  ADDRESS(kernel<2, 4, tall, type>)
#define STACK(kernel, type)       \
  STACK_TALL(kernel, type, false) \
  STACK_TALL(kernel, type, true)

#define WIDE(type, tall)                         \
  ADDRESS(newton_schulz_wide<1, 8, tall, type>)  \
  ADDRESS(newton_schulz_wide<1, 16, tall, type>) \
  ADDRESS(newton_schulz_wide<2, 8, tall, type>)

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)  // sm_90a, which alone has wgmma
#define ARCHITECTURE(type)                         \
  STACK(newton_schulz, type)                       \
  STACK(newton_schulz_backward, type)              \
  WIDE(type, false)                                \
  WIDE(type, true)                                 \
  ADDRESS(newton_schulz_256<false, type>)          \
  ADDRESS(newton_schulz_256<true, type>)           \
  ADDRESS(newton_schulz_256_backward<false, type>) \
  ADDRESS(newton_schulz_256_backward<true, type>)
#else
#define ARCHITECTURE(type)         \
  STACK(newton_schulz_stack, type) \
  STACK(newton_schulz_stack_backward, type)
#endif

#define INSTANCES(type)                     \
  SMALL(newton_schulz_small, type)          \
  SMALL(newton_schulz_small_backward, type) \
  ARCHITECTURE(type)

extern const void* const instances[] = {INSTANCES(half) INSTANCES(bfloat16)};

}  // namespace fastweights
