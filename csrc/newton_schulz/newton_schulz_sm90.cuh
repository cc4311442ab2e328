// Newton–Schulz on stacks of matrices on Hopper: a matrix stays in shared memory from its load to
// its store. Wide form, per step: A = X·Xᵀ, X ← (a·I + b·A + c·A²)·X.
#pragma once

#include "stack_sm90.cuh"

namespace fastweights {

// Blocks of a multiprocessor that leave each other room.
template <int kRowTiles, int kColTiles>
constexpr int kForwardBlocks = kRowTiles == 2 ? (kColTiles == 2 ? 2 : 1)
                                              : (kColTiles == 1   ? 6
                                                 : kColTiles == 2 ? 4
                                                                  : 3);
template <int kRowTiles, int kColTiles>  // and of a block's sums
constexpr int kForwardSums = kRowTiles == 2 && kColTiles == 2 ? 1 : 2;
template <int kRowTiles, int kColTiles>
constexpr int kBackwardBlocks = kRowTiles == 2 ? 1
                                               : (kColTiles == 1   ? 4
                                                  : kColTiles == 2 ? 3
                                                                   : 2);

// One step from `x` into another place, `y`.
template <typename S>
__device__ __forceinline__ void newton_schulz_step(const S& stack, typename S::Own& mine, u32 x,
                                                   u32 y, u32 a_tiles, const float (&f)[3]) {
  typename S::Gram gram, polynomial;
  if constexpr (!S::kCarried) {
    stack.own(x, mine);
  }
  stack.product(mine, x, gram, a_tiles);
  S::publish();
  stack.polynomial(f, gram, a_tiles, polynomial);
  S::columns([&](int k, Accumulator& sum) { stack.template apply<false>(polynomial, x, k, sum); },
             [&](int k, const Accumulator& sum) {
               round_to_left<half>(sum, mine[k]);
               stack.put(y, k, mine[k]);
             });
  S::publish();
}

// x, y: `count` contiguous matrices of rows × cols; a block takes every gridDim.x-th one.
// Dynamic shared memory: kScratchBytes, X twice, and A.
template <int kRowTiles, int kColTiles, bool kTall, typename T>
__global__ void __launch_bounds__(128 * kRowTiles, kForwardBlocks<kRowTiles, kColTiles>)
    newton_schulz(const T* __restrict__ x, T* __restrict__ y, long long count, int rows, int cols,
                  int steps, float scale, float eps, int whole,
                  const __grid_constant__ Coefficients coefficients) {
  using S = Stack<kRowTiles, kColTiles, kTall, kForwardSums<kRowTiles, kColTiles>>;
  extern __shared__ __align__(1024) unsigned char memory[];
  float* const scratch = reinterpret_cast<float*>(memory);
  const S stack;
  const u32 x_tiles = shared_address(memory) + kScratchBytes;
  const u32 a_tiles = x_tiles + 2 * S::kBytes;
  auto place = [&](int step) { return x_tiles + step % 2 * S::kBytes; };

  for (long long n = blockIdx.x; n < count; n += gridDim.x) {
    stack.template load<false>(x_tiles, x + n * rows * cols, rows, cols, whole, scale, eps,
                               scratch);
    S::publish();
    typename S::Own mine;
    stack.own(x_tiles, mine);
    for (int step = 0; step < steps; ++step) {
      newton_schulz_step(stack, mine, place(step), place(step + 1), a_tiles,
                         coefficients.of_step[step]);
    }
    stack.unload(place(steps), y + n * rows * cols, rows, cols, whole);
  }
}

// dx of `count` matrices, from x and dy alone. Forward runs again and keeps its iterates; then,
// from the last step to the first, with A, B = a·I + b·A + c·A² of that step's X:
//   dZ = dX·Xᵀ, S = dZ + dZᵀ, dA + dAᵀ = b·S + c·(A·S + S·A), dX ← B·dX + (dA + dAᵀ)·X.
// It is linear in dy, so dy is brought to norm kScale first: 16 bits have the range for that.
// Iterates from number `kept` − 1 on share one place of shared memory; each waits in `ring` while a
// later one is there. Forward takes the place of dX, too, to go from one iterate to the next.
// `ring` is for a block (steps − kept)·kBytes, and unread if `kept` ≥ `steps`. Dynamic shared
// memory: kScratchBytes, two rows × rows matrices, dX, and `kept` ≥ 1 iterates.
template <int kRowTiles, int kColTiles, bool kTall, typename T>
__global__ void __launch_bounds__(128 * kRowTiles, kBackwardBlocks<kRowTiles, kColTiles>)
    newton_schulz_backward(const T* __restrict__ x, const T* __restrict__ dy, T* __restrict__ dx,
                           uint4* ring, long long count, int rows, int cols, int steps, int kept,
                           float eps, int whole,
                           const __grid_constant__ Coefficients coefficients) {
  using S = Stack<kRowTiles, kColTiles, kTall>;
  constexpr float kScale = 0.125f;
  extern __shared__ __align__(1024) unsigned char memory[];
  float* const scratch = reinterpret_cast<float*>(memory);
  const S stack;
  const u32 a_tiles = shared_address(memory) + kScratchBytes;
  const u32 p_tiles = a_tiles + S::kGramBytes;
  const u32 d_tiles = p_tiles + S::kGramBytes;
  const u32 iterates = d_tiles + S::kBytes;
  auto iterate = [&](int step) { return iterates + min(step, kept - 1) * S::kBytes; };
  auto place = [&](int step) {  // such that the last one is in its place
    return step >= kept - 1 && (steps - 1 - step) % 2 ? d_tiles : iterate(step);
  };
  auto waiting = [&](int step) {
    const long long place = blockIdx.x * (long long)(steps - kept) + (step - (kept - 1));
    return ring + place * (S::kBytes / 16);
  };

  for (long long n = blockIdx.x; n < count; n += gridDim.x) {
    const long long offset = n * rows * cols;
    const float norm =
        stack.template load<false>(place(0), x + offset, rows, cols, whole, 1.0f, eps, scratch);
    S::publish();
    typename S::Own mine;
    stack.own(place(0), mine);
    for (int step = 0; step + 1 < steps; ++step) {
      if (step + 1 >= kept) {
        stack.keep(place(step), waiting(step));
      }
      newton_schulz_step(stack, mine, place(step), place(step + 1), a_tiles,
                         coefficients.of_step[step]);
    }
    const float upstream =
        stack.template load<true>(d_tiles, dy + offset, rows, cols, whole, kScale, 0.0f, scratch);
    S::publish();
    for (int step = steps - 1; step >= 0; --step) {
      const u32 x_tiles = iterate(step);
      const float (&f)[3] = coefficients.of_step[step];
      typename S::Gram gram, polynomial, grad, mixed;
      stack.own(d_tiles, mine);
      stack.product(mine, x_tiles, grad, p_tiles);
      stack.own(x_tiles, mine);
      stack.product(mine, x_tiles, gram, a_tiles);
      S::publish();
      stack.polynomial(f, gram, a_tiles, polynomial);
      stack.add_transposed(grad, 1.0f, p_tiles, 1.0f);  // S
      __syncthreads();                                  // all are through with the tiles of A
      stack.store(a_tiles, grad);
      S::publish();
      S::square_product(gram, a_tiles,
                        [&](int r, const Accumulator& sum) { round_to_left<half>(sum, mixed[r]); });
      stack.store(p_tiles, mixed);
      __syncthreads();
      stack.add_transposed(mixed, f[2], p_tiles, f[2]);  // c·(A·S + S·A)
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        S::combine(mixed[r], 1.0f, mixed[r], f[1], grad[r]);
      }
      S::columns(
          [&](int k, Accumulator& sum) {
            stack.template apply<false>(polynomial, d_tiles, k, sum);
            stack.template apply<true>(mixed, x_tiles, k, sum);
          },
          [&](int k, const Accumulator& sum) { round_to_left<half>(sum, mine[k]); });
      __syncthreads();
      stack.put(d_tiles, mine);
      if (step >= kept) {
        stack.recall(x_tiles, waiting(step - 1));
      }
      S::publish();
    }

    stack.unload_gradient(d_tiles, iterates, dx + offset, rows, cols, whole, upstream / kScale,
                          norm, eps, scratch);
  }
}

}  // namespace fastweights
