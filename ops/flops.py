"""FLOP conventions, written once: the op registrations, the benchmark and the cost model use these.

All count *useful* work of one call. `attention_executed` counts what a kernel form really runs and
is meant for notes, never for a table of TFLOP/s.

| work                  | formula                                                             |
|-----------------------|---------------------------------------------------------------------|
| attention, forward    | 4·D a visible (query, key) pair and query head                      |
| attention, backward   | 2.5 × forward (five matrix products against two)                    |
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


def matmul(m: int, n: int, k: int, *batch: int) -> int:
    """FLOPs of a (batched) matrix product (m, k) × (k, n)."""
    return 2 * m * n * k * prod(batch)
