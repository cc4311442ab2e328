"""Full chunks of a cache are folded into M and S, before the tokens that find them full.

With A, a, B and the weights P, U of the rows at a chunk's end

    M ← A M + a S − φ(K)ᵀ (P ∘ R)      S ← B S − φ(K)ᵀ (U ∘ R)

in place; nothing else of the cache changes, so that `omega_step` finds the chunk still full.
"""

import triton
import triton.language as tl

from .triton_kernels import ARRIVED, _features, _of, _tile

TF32 = tl.constexpr(-1 << 13)  # the bits of a number that TF32 keeps
RUNTIME = (
    "rows", "heads", "window", "chunk", "stride_powers",
    "stride_state_n", "stride_state_h", "stride_state_r",
    "stride_velocity_n", "stride_velocity_h", "stride_velocity_r",
    "stride_keys_n", "stride_keys_r", "stride_keys_h",
    "stride_residuals_n", "stride_residuals_r", "stride_residuals_h",
    "stride_write_n", "stride_write_h", "stride_write_r",
    "stride_push_n", "stride_push_h", "stride_push_r",
    "stride_rate_n", "stride_rate_h", "stride_carry_n", "stride_carry_h",
    "stride_drop_n", "stride_drop_h", "stride_tail_n", "stride_filled_n",
)  # fmt: skip


@triton.jit
def _added(total, keys, weights, r, there, error, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """total + keys (weights ∘ error), of weights at r.

    HALF: keys have no more bits than TF32, so that two products are exact to fp32.
    """
    error *= tl.load(weights + r, mask=there, other=0.0)[:, None]
    if HALF:
        high = (error.to(tl.int32, bitcast=True) & TF32).to(tl.float32, bitcast=True)
        total = tl.dot(keys, high, total, input_precision=PRECISION)
        error -= high
    return tl.dot(keys, error, total, input_precision=PRECISION)


@triton.jit(do_not_specialize=RUNTIME)
def omega_fold(
    slots, powers,
    state, velocity, keys, residuals, write, push, rate, carry, drop, tail, filled,
    rows: tl.int32, heads: tl.int32, window: tl.int32, chunk: tl.int32, stride_powers: tl.int32,
    stride_state_n: tl.int64, stride_state_h: tl.int64, stride_state_r: tl.int64,
    stride_velocity_n: tl.int64, stride_velocity_h: tl.int64, stride_velocity_r: tl.int64,
    stride_keys_n: tl.int64, stride_keys_r: tl.int64, stride_keys_h: tl.int64,
    stride_residuals_n: tl.int64, stride_residuals_r: tl.int64, stride_residuals_h: tl.int64,
    stride_write_n: tl.int64, stride_write_h: tl.int64, stride_write_r: tl.int64,
    stride_push_n: tl.int64, stride_push_h: tl.int64, stride_push_r: tl.int64,
    stride_rate_n: tl.int64, stride_rate_h: tl.int64,
    stride_carry_n: tl.int64, stride_carry_h: tl.int64,
    stride_drop_n: tl.int64, stride_drop_h: tl.int64,
    stride_tail_n: tl.int64, stride_filled_n: tl.int64,
    MOMENTUM: tl.constexpr, POWERS: tl.constexpr, GIVEN: tl.constexpr, ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    ROWS: tl.constexpr, SCAN: tl.constexpr, STAGES: tl.constexpr, HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Every program finds the rows that fold, SCAN of them at a time, and takes each n-th tile.

    A tile [D, V] of M, with that of S, is no other program's: both are read before one is written.
    ROWS of the chunk are added at a time, STAGES blocks of them in flight.
    """
    TILES_V: tl.constexpr = (VALUES + V - 1) // V
    TILES: tl.constexpr = TILES_V * ((WIDTH + D - 1) // D)
    member = tl.arange(0, SCAN)
    item = tl.program_id(0)  # a tile of all those of the rows that fold
    begun = 0  # of items, in rows that are behind
    for n0 in tl.range(0, rows, SCAN):
        slot_of = tl.load(slots + n0 + member, mask=n0 + member < rows, other=-1)
        named = slot_of >= 0
        count = tl.load(filled + slot_of * stride_filled_n, mask=named, other=0) & (ARRIVED - 1)
        tail_of = tl.load(tail + slot_of * stride_tail_n, mask=named, other=0)
        full = (named & (count == chunk)).to(tl.int32)
        end = begun + tl.sum(full, 0) * heads * TILES
        if item < end:
            order = tl.cumsum(full, 0) * full  # from 1 on; 0: does not fold
            while item < end:
                mine = order == (item - begun) // TILES // heads + 1
                head = (item - begun) // TILES % heads
                d0 = (item - begun) % TILES // TILES_V * D
                e0 = (item - begun) % TILES_V * V
                item += tl.num_programs(0)
                slot = tl.sum(tl.where(mine, slot_of, 0), 0)
                length = tl.sum(tl.where(mine, tail_of, 0), 0)

                d = d0 + tl.arange(0, D)
                e = e0 + tl.arange(0, V)
                block = tl.arange(0, ROWS)
                inside = (d < WIDTH)[:, None] & (e < VALUES)[None, :]
                memory = _of(state, slot, head, stride_state_n, stride_state_h)
                memory = _tile(memory, d, e, stride_state_r, ALIGNED)
                # Loaded here and used behind the loop, whose rows should not wait for them.
                M = tl.load(memory, mask=inside, other=0.0)
                A = tl.load(_of(rate, slot, head, stride_rate_n, stride_rate_h))
                of_write = _of(write, slot, head, stride_write_n, stride_write_h)
                of_push = of_write
                impulse = memory
                S = M
                a = A
                B = A
                if MOMENTUM:
                    impulse = _of(velocity, slot, head, stride_velocity_n, stride_velocity_h)
                    impulse = _tile(impulse, d, e, stride_velocity_r, ALIGNED)
                    S = tl.load(impulse, mask=inside, other=0.0)
                    a = tl.load(_of(carry, slot, head, stride_carry_n, stride_carry_h))
                    B = tl.load(_of(drop, slot, head, stride_drop_n, stride_drop_h))
                    of_push = _of(push, slot, head, stride_push_n, stride_push_h)
                of_keys = _of(keys, slot, head, stride_keys_n, stride_keys_h)
                of_errors = _of(residuals, slot, head, stride_residuals_n, stride_residuals_h)
                of_powers = powers
                if GIVEN:
                    of_powers += head * stride_powers
                written = tl.zeros([D, V], tl.float32)
                pushed = written
                older = window - 1
                for r0 in tl.range(older - length, older + chunk, ROWS, num_stages=STAGES):
                    there = r0 + block < older + chunk
                    # Keys come as columns: a transpose of their rows would go through shared
                    # memory once more.
                    at = of_keys + r0 * stride_keys_r
                    at = at + (d[:, None] + block.to(tl.int64)[None, :] * stride_keys_r)
                    if ALIGNED:
                        at = tl.multiple_of(at, (16, 16))
                    kr = tl.load(at, mask=(d < WIDTH)[:, None] & there[None, :], other=0.0)
                    kr = _features(kr, (d < WIDTH)[:, None], of_powers, POWERS, GIVEN)  # [D, ROWS]
                    at = _tile(
                        of_errors + r0 * stride_residuals_r, block, e, stride_residuals_r, ALIGNED
                    )
                    error = tl.load(at, mask=there[:, None] & (e < VALUES)[None, :], other=0.0)
                    r = (r0 + block) * stride_write_r
                    written = _added(written, kr, of_write, r, there, error, HALF, PRECISION)
                    if MOMENTUM:
                        r = (r0 + block) * stride_push_r
                        pushed = _added(pushed, kr, of_push, r, there, error, HALF, PRECISION)
                written = A * M - written
                if MOMENTUM:
                    written += a * S
                    tl.store(impulse, B * S - pushed, mask=inside)
                tl.store(memory, written, mask=inside)
        begun = end
