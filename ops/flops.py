"""FLOP conventions, written once: the op registrations, the benchmark and the cost model use these.

All count *useful* work of one call. `attention_executed` counts what a kernel form really runs and
is meant for notes, never for a table of TFLOP/s.

| work                  | formula                                                             |
|-----------------------|---------------------------------------------------------------------|
| attention, forward    | 4·D a visible (query, key) pair and query head                      |
| attention, backward   | 2.5 × forward (five matrix products against two)                    |
| Newton–Schulz, a step | 4·n²m + 2·n³ a matrix, n = min(rows, cols), m = max(rows, cols)     |
| its backward, k steps | k·(10·n²m + 4·n³) − 2·n²m                                           |
| Gram factor, k steps  | (8·k − 6)·n³                                                        |
| its backward          | (24·k − 20)·n³, of one step 6·n³                                    |
| Omega rule, a chunk   | (2·b + 4·n)·D·Dv + 2·b·n·(E + Dv) a head, n = b + window − 1        |
| its backward          | (6·b + 12·n)·D·Dv + 2·b·n·(3·E + 2·Dv)                              |
| momentum adds to both | (2·b + 2·n)·D·Dv, and three times that                              |
| Atlas, a chunk        | (2·b + 2·n + 2·w)·D·Dv, w = b + max(L, 1)·(window − 1) keys written |
| its backward          | three times that; and both L times what follows                     |
| its Newton–Schulz     | the less of a matrix's and of 4·n²m and a Gram factor's; n ≤ m here |
| its backward          | the less of a matrix's and of 8·n²m and a Gram factor's             |
| a single Omega step   | a chunk's, divided by b                                             |
| polynomial features   | D a row; backward 4·D                                               |
| φ(x) S, φ(x)ᵀ G       | 2·D·Dv a token and head; backward twice that                        |
| gated delta rule      | 6·Dk·Dv a token and head                                            |
| its backward          | 16·Dk·Dv: twice that, and the two products that make S              |
| delta rewrite         | 4·P·Dv a token written and 2·P·Dv one read, of a head; P features   |
| sequential adds       | 2·M·P + M·Dv a token of M                                           |
| its backward          | 10·P·Dv and 6·P·Dv; sequential adds 6·M·P + 3·M·Dv                  |
| short convolution     | 2·K a token and channel; backward twice that, or three times        |

A product counts all of its elements, also where it is symmetric. Backward counts what has to be
computed again, as that of attention does, because only the inputs are saved. E is the width in
which products of two tokens' features are formed: the keys' where a kernel gives them, else D.
L tokens of an Atlas chunk meet Newton–Schulz; S at each needs the keys since the one before.
"""

from __future__ import annotations

from math import prod

BACKWARD_OVER_FORWARD = 2.5


def visible_pairs(tq: int, tk: int, *, causal: bool, window: int | None) -> int:
    """Pairs (query, key) that see each other in one head of one sequence.

    Row i sees n_i keys, the last min(n_i, window) of them count;
    n_i = clamp(tk − tq + i + 1, 0, tk) if causal, else tk.
    """
    limit = tk if window is None else min(window, tk)
    if not causal:
        return tq * limit
    # Row i = tq − 1 − r sees min(max(tk − r, 0), limit) keys, r = 0 … tq − 1.
    full = min(max(tk - limit + 1, 0), tq)  # rows that reach the limit
    rest = min(tq, tk) - full  # rows after those see limit − 1, limit − 2, …
    return full * limit + rest * (2 * (limit - 1) - rest + 1) // 2 if rest > 0 else full * limit


def attention_forward(pairs: int, head_dim: int, heads: int) -> int:
    """Useful FLOPs of an attention forward: two products of 2·D a pair."""
    return 4 * pairs * head_dim * heads


def attention_backward(pairs: int, head_dim: int, heads: int) -> int:
    """Useful FLOPs of an attention backward: 2.5 × forward."""
    return int(BACKWARD_OVER_FORWARD * attention_forward(pairs, head_dim, heads))


def attention_executed(pairs: int, head_dim: int, heads: int, *, form: str) -> int:
    """FLOPs a kernel form executes on useful pairs: forward 4·D, single pass 10·D, split 14·D."""
    return {"fwd": 4, "single": 10, "split": 14}[form] * pairs * head_dim * heads


def newton_schulz_forward(n: int, m: int, steps: int) -> int:
    """Useful FLOPs for one matrix, n ≤ m: A = XXᵀ and ZX, 2·n²m each, and A², 2·n³, a step."""
    return steps * (4 * n * n * m + 2 * n**3)


def newton_schulz_backward(n: int, m: int, steps: int) -> int:
    """Useful FLOPs of the backward for one matrix, n ≤ m, from the input alone.

    The forward again but for the last ZX. Then a step has dX Xᵀ, Z dX and W X, 2·n²m each, and one
    product of 2·n³: W = dA + dAᵀ = T + Tᵀ with T = (b/2)·D + c·A D and D = dZ + dZᵀ.
    """
    again = newton_schulz_forward(n, m, steps) - 2 * n * n * m
    return again + steps * (6 * n * n * m + 2 * n**3)


def gram_factor_forward(n: int, steps: int) -> int:
    """Useful FLOPs for one Gram matrix: R², QZ, ZR and (ZR)Z a step, 2·n³ each.

    The first QZ is Z itself, and the last step needs no new R.
    """
    return 2 * n**3 * (4 * steps - 3)


def gram_factor_backward(n: int, steps: int) -> int:
    """Useful FLOPs of the backward for one Gram matrix.

    Again: R² each step, ZR and (ZR)Z but for the last, QZ but for the last and the first. Then each
    step R dZ and dZ R, and all but one of the steps Q dQ, dQ Z, and the four products with dR.
    """
    again = steps + 2 * (steps - 1) + max(steps - 2, 0)
    return 2 * n**3 * (again + 2 * steps + 6 * (steps - 1))


def _omega_chunks(tokens: int, chunk_size: int, window: int) -> list[tuple[int, int, int]]:
    """How many chunks there are of b tokens and n keys: (count, b, n)."""
    full, rest = divmod(tokens, chunk_size)
    return [(count, b, b + window - 1) for count, b in ((full, chunk_size), (1, rest)) if b]


def omega_forward(
    tokens: int, chunk_size: int, window: int, wide: int, values: int, *, momentum: bool,
    pairs: int | None = None,
) -> int:  # fmt: skip
    """Useful FLOPs of one head: Q M, K M and Kᵀ(P∘R), with momentum Q S and Kᵀ(U∘R); Q Kᵀ and
    its product with R. `pairs`: E; None: D.
    """
    state, pairs = wide * values, wide if pairs is None else pairs
    return sum(
        count
        * ((2 * b + 4 * n) * state + 2 * b * n * (pairs + values) + momentum * 2 * (b + n) * state)
        for count, b, n in _omega_chunks(tokens, chunk_size, window)
    )


def omega_backward(
    tokens: int, chunk_size: int, window: int, wide: int, values: int, *, momentum: bool,
    pairs: int | None = None,
) -> int:  # fmt: skip
    """Useful FLOPs of the backward of one head, from the arguments alone.

    Again: R, the states of all chunks, Q M and Q Kᵀ. Then two products a query row with M or dM,
    four a key row, and two more of each in-chunk product. `pairs`: as in forward.
    """
    state, pairs = wide * values, wide if pairs is None else pairs
    return sum(
        count
        * (
            (6 * b + 12 * n) * state
            + 2 * b * n * (3 * pairs + 2 * values)
            + momentum * 6 * (b + n) * state
        )
        for count, b, n in _omega_chunks(tokens, chunk_size, window)
    )


def _atlas_chunks(
    tokens: int, chunk_size: int, window: int, wide: int, values: int, stride: int
) -> tuple[int, int]:
    """Products of one head with M, or into S, in FLOPs; and how often Newton–Schulz runs."""
    products = met = 0
    for count, b, n in _omega_chunks(tokens, chunk_size, window):
        written = b + max(b // stride, 1) * (window - 1)
        products += count * 2 * (b + n + written) * wide * values
        met += count * (b // stride)
    return products, met


def atlas_forward(
    tokens: int, chunk_size: int, window: int, wide: int, values: int, *, stride: int, steps: int
) -> int:
    """Useful FLOPs of one head: Q M, K M, what keys write into S, and Newton–Schulz of it."""
    products, met = _atlas_chunks(tokens, chunk_size, window, wide, values, stride)
    n, m = sorted((wide, values))
    gram = 4 * n * n * m + gram_factor_forward(n, steps)
    return products + met * min(newton_schulz_forward(n, m, steps), gram)


def atlas_backward(
    tokens: int, chunk_size: int, window: int, wide: int, values: int, *, stride: int, steps: int
) -> int:
    """Useful FLOPs of the backward of one head, from the arguments alone.

    Each product again, and its two gradients. Of a Gram matrix SᵀS again, dQ, and two that make dS.
    """
    products, met = _atlas_chunks(tokens, chunk_size, window, wide, values, stride)
    n, m = sorted((wide, values))
    gram = 8 * n * n * m + gram_factor_backward(n, steps)
    return 3 * products + met * min(newton_schulz_backward(n, m, steps), gram)


def polynomial_features_forward(rows: int, wide: int) -> int:
    """Useful FLOPs of φ of that many rows: each of D features is a product with the one below."""
    return rows * wide


def polynomial_features_backward(rows: int, wide: int) -> int:
    """Useful FLOPs of its backward: a feature of degree 2 has two products, each added up."""
    return 4 * rows * wide


def polynomial_product(rows: int, wide: int, values: int) -> int:
    """Useful FLOPs of φ(x) S or φ(x)ᵀ G, or of one of the two gradients of either."""
    return 2 * rows * wide * values


def gated_delta_forward(tokens: int, width: int, values: int) -> int:
    """Useful FLOPs of so many tokens' heads by the recurrence: k S, kᵀ u and q S."""
    return 6 * tokens * width * values


def gated_delta_backward(tokens: int, width: int, values: int) -> int:
    """Useful FLOPs of its backward, from the arguments alone.

    Again: k S and kᵀ u. Then two products for each of forward's three.
    """
    return 16 * tokens * width * values


def delta_rewrite_forward(
    tokens: int, reads: int, wide: int, values: int, *, sequential: bool
) -> int:
    """Useful FLOPs of one head: F A and Fᵀ E of `tokens`, and what `reads` queries read."""
    triangle = tokens * tokens * (2 * wide + values) if sequential else 0
    return (4 * tokens + 2 * reads) * wide * values + triangle


def delta_rewrite_backward(
    tokens: int, reads: int, wide: int, values: int, *, sequential: bool
) -> int:
    """Useful FLOPs of its backward, from the arguments alone.

    Of a token F A again, F dA', E dA'ᵀ, Fᵀ dN and dN Aᵀ; of a query its read again, gᵀ dN and
    dN A'ᵀ.
    """
    triangle = 3 * tokens * tokens * (2 * wide + values) if sequential else 0
    return (10 * tokens + 6 * reads) * wide * values + triangle


def short_conv_forward(tokens: int, channels: int, taps: int) -> int:
    """Useful FLOPs of a depthwise convolution: its gates and its activation are not counted."""
    return 2 * tokens * channels * taps


def short_conv_backward(tokens: int, channels: int, taps: int, *, again: bool) -> int:
    """Useful FLOPs of its backward: those of z, of the weight, and the sums `again` if needed."""
    return (2 + again) * short_conv_forward(tokens, channels, taps)


def matmul(m: int, n: int, k: int, *batch: int) -> int:
    """FLOPs of a (batched) matrix product (m, k) × (k, n)."""
    return 2 * m * n * k * prod(batch)
