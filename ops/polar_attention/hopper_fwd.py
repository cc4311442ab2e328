"""Forward kernel for Hopper, in Gluon: the same online softmax with the pipeline written out.

    producer (1 warp)      TMA: q once, then k and v tiles of BLOCK_N keys, STAGES deep
    consumer 0, 1 (4 warps each, 64 rows each)
        step i:  S_i = q·k_iᵀ and acc += P_{i−1}·v_{i−1} start together, so that the tensor cores
                 have the one while S_i is read, and the other consumer's while both exponentiate

    k_full, v_full [STAGES]  completed by the copies     k_free, v_free [STAGES]  all consumers

The compiler's own pipeliner waits for each product at once and makes all warps meet for each copy,
which is what this file is for. Making the consumers take turns, or holding the second wait back
until the exponentials are through, was measured and gained nothing.

Serves dense calls (no packing, no n_keys) whose tensors TMA can address. Steps that need masks come
first: the right edge from full_end on, then the left one; a softmax does not mind the order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

RUNTIME = ("tq", "tk", "heads_q", "group", "window", "scale")

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # of one consumer: the M of a wgmma


@gluon.jit
def _visible(rows, tq, tk, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """The keys low ≤ j < high that each row sees (as common.key_range; rows may be a scalar)."""
    high = tk + rows * 0
    if CAUSAL:
        high = gl.minimum(gl.maximum(tk - tq + rows + 1, 0), tk)
    high = gl.where(rows < tq, high, 0)
    low = rows * 0
    if WINDOW:
        low = gl.maximum(high - window, 0)
    return low, high


@gluon.jit
def _steps(row0, tq, tk, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
           BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):  # fmt: skip
    """(begin, full_end, right, masked, steps) of a query tile.

    Step i < right starts at key full_end + i·BLOCK_N, a later one at begin + (i − right)·BLOCK_N;
    the first `masked` need masks.
    """
    row1 = gl.minimum(row0 + BLOCK_M, tq) - 1
    low_min, high_min = _visible(row0, tq, tk, window, CAUSAL, WINDOW)
    low_max, end = _visible(row1, tq, tk, window, CAUSAL, WINDOW)
    begin = low_min // BLOCK_N * BLOCK_N
    full = gl.minimum((low_max + BLOCK_N - 1) // BLOCK_N, (end + BLOCK_N - 1) // BLOCK_N) * BLOCK_N
    full_end = gl.maximum(high_min // BLOCK_N * BLOCK_N, full)
    right = gl.maximum((end - full_end + BLOCK_N - 1) // BLOCK_N, 0)
    masked = right + (full - begin) // BLOCK_N
    steps = right + (full_end - begin) // BLOCK_N
    return begin, full_end, right, masked, steps


@gluon.jit
def _key_of(step, begin, full_end, right, BLOCK_N: gl.constexpr):
    return gl.where(step < right, full_end + step * BLOCK_N, begin + (step - right) * BLOCK_N)


@gluon.jit
def _produce(
    q, k, v, tiles, batch, head, head_k, row0, begin, full_end, right, steps,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_tile, k_tiles, v_tiles, q_full, k_full, v_full, k_free, v_free = tiles
    BYTES: gl.constexpr = BLOCK_N * BLOCK_D * 2
    mbarrier.expect(q_full, CONSUMERS * ROWS * BLOCK_D * 2)
    for who in gl.static_range(CONSUMERS):
        tma.async_copy_global_to_shared(
            q, [batch, head, row0 + who * ROWS, 0], q_full, q_tile.index(who)
        )
    for i in range(steps):
        j = _key_of(i, begin, full_end, right, BLOCK_N)
        stage = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), BYTES)
        tma.async_copy_global_to_shared(
            k, [batch, head_k, j, 0], k_full.index(stage), k_tiles.index(stage)
        )
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), BYTES)
        tma.async_copy_global_to_shared(
            v, [batch, head_k, j, 0], v_full.index(stage), v_tiles.index(stage)
        )


@gluon.jit
def _softmax(s, m, l, s2, rate, j, low, high, COUNT: gl.constexpr, MASKED: gl.constexpr,
             BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr):  # fmt: skip
    """One step of the online softmax: weights, α and the new running values."""
    if MASKED:
        at = j + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))
        seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
        s = gl.where(seen, s * rate[:, None], float("-inf"))
        m_new = gl.maximum(m, gl.max(s, 1))
        # A row that has seen no key yet keeps −inf; shifting by 0 keeps its p at 0, not NaN.
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(s - shift[:, None])
        alpha = gl.exp2(m - shift)
    else:
        m_new = gl.maximum(m, gl.max(s, 1) * rate)
        p = gl.exp2(s * rate[:, None] - m_new[:, None])
        alpha = gl.exp2(m - m_new)
    # Sums of the unrounded p, here: from the rounded one behind the products they cost 8 % more.
    l = l * alpha + gl.sum(p, 1)
    if COUNT:
        s2 = s2 * (alpha * alpha) + gl.sum(p * p, 1)
    return p, alpha, m_new, l, s2


@gluon.jit
def _consume_step(
    i, acc, p, m, l, s2, rate, low, high, q_mine, k_tiles, v_tiles, k_full, v_full, k_free, v_free,
    begin, full_end, right, COUNT: gl.constexpr, MASKED: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    stage = i % STAGES
    phase = (i // STAGES) & 1
    before = (i - 1) % STAGES
    phase_before = ((i - 1) // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    mbarrier.wait(v_full.index(before), phase_before)
    key = k_tiles.index(stage).reshape([BLOCK_N, BLOCK_D])
    value = v_tiles.index(before).reshape([BLOCK_N, BLOCK_D])
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q_mine, key.permute((1, 0)), s, use_acc=False, is_async=True)
    acc = warpgroup_mma(p, value, acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_free.index(stage), count=1)
    j = _key_of(i, begin, full_end, right, BLOCK_N)
    weight, alpha, m, l, s2 = _softmax(
        s, m, l, s2, rate, j, low, high, COUNT, MASKED, BLOCK_N, S_LAYOUT
    )
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_free.index(before), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
    p = gl.convert_layout(weight.to(k_tiles.dtype), P_LAYOUT)
    return acc, p, m, l, s2


@gluon.jit
def _log1p(x):
    one_plus = 1.0 + x
    lost = one_plus - 1.0
    return gl.where(lost == 0.0, x, gl.log(one_plus) * (x / gl.where(lost == 0.0, 1.0, lost)))


@gluon.jit
def _tanh(x):
    square = x * x
    series = x * (1.0 + square * (-0.33333333 + square * (0.13333333 - square * 0.053968254)))
    decay = gl.exp(-2.0 * gl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    return gl.where(gl.abs(x) < 0.1, series, gl.where(x < 0.0, -far, far))


@gluon.jit
def _consume(
    WHO: gl.constexpr, tiles, parameters, results, place, plan,
    POLAR: gl.constexpr, NULL_VALUE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    EPS: gl.constexpr,
):  # fmt: skip
    q_tile, k_tiles, v_tiles, q_full, k_full, v_full, k_free, v_free = tiles
    null_value, null_base, null_slope, length_gain, magnitude_gain = parameters
    out, count, lse, n_eff, rho, null_mass = results
    batch, head, batch_head, row0, tq, tk, heads_q, window, scale = place
    begin, full_end, right, masked, steps = plan
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    R_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    rows = row0 + WHO * ROWS + gl.arange(0, ROWS, layout=R_LAYOUT)
    low, high = _visible(rows, tq, tk, window, CAUSAL, WINDOW)
    length = gl.maximum(high - low, 1).to(gl.float32)
    t = gl.full([ROWS], 1.0, gl.float32, R_LAYOUT)
    if POLAR:
        # Everything the end needs of memory is fetched while the first tiles are on their way.
        t = 1.0 + gl.load(length_gain + head).to(gl.float32) * gl.log(length)
        log_n1 = gl.sqrt(gl.log(length + 1.0))
        nu = gl.load(null_base + head).to(gl.float32)
        nu += gl.load(null_slope + head).to(gl.float32) * log_n1
        null_logit = t * nu * LOG2E
        gain = gl.load(magnitude_gain + head).to(gl.float32)
    rate = t * (scale * LOG2E)

    m = gl.full([ROWS], float("-inf"), gl.float32, R_LAYOUT)
    l = gl.zeros([ROWS], gl.float32, R_LAYOUT)
    s2 = gl.zeros([ROWS], gl.float32, R_LAYOUT)
    acc = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    q_mine = q_tile.index(WHO).reshape([ROWS, BLOCK_D])
    mbarrier.wait(q_full, 0)
    if steps > 0:
        # The first step has no product of weights and values to start beside its scores.
        mbarrier.wait(k_full.index(0), 0)
        key = k_tiles.index(0).reshape([BLOCK_N, BLOCK_D])
        s = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
        s = warpgroup_mma(q_mine, key.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_free.index(0), count=1)
        j = _key_of(0, begin, full_end, right, BLOCK_N)
        weight, _, m, l, s2 = _softmax(
            s, m, l, s2, rate, j, low, high, POLAR, True, BLOCK_N, S_LAYOUT
        )
        p = gl.convert_layout(weight.to(k_tiles.dtype), P_LAYOUT)
        for i in range(1, masked):
            acc, p, m, l, s2 = _consume_step(
                i, acc, p, m, l, s2, rate, low, high, q_mine, k_tiles, v_tiles, k_full,
                v_full, k_free, v_free, begin, full_end, right, POLAR, True, BLOCK_N, BLOCK_D,
                STAGES, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
        for i in range(gl.maximum(masked, 1), steps):
            acc, p, m, l, s2 = _consume_step(
                i, acc, p, m, l, s2, rate, low, high, q_mine, k_tiles, v_tiles, k_full,
                v_full, k_free, v_free, begin, full_end, right, POLAR, False, BLOCK_N, BLOCK_D,
                STAGES, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
        last = (steps - 1) % STAGES
        mbarrier.wait(v_full.index(last), ((steps - 1) // STAGES) & 1)
        value = v_tiles.index(last).reshape([BLOCK_N, BLOCK_D])
        acc = warpgroup_mma(p, value, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])

    A_LAYOUT: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    m = gl.convert_layout(m, A_LAYOUT)
    l = gl.convert_layout(l, A_LAYOUT)
    s2 = gl.convert_layout(s2, A_LAYOUT)
    rows = gl.convert_layout(rows, A_LAYOUT)
    keyless = l == 0.0
    inverse = 1.0 / gl.where(keyless, 1.0, l)
    log_sum = m + gl.log2(l)
    inside = rows < tq
    at_row = batch_head.to(gl.int64) * tq + rows
    cols = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, O_LAYOUT))
    if POLAR:
        gap = log_sum - gl.convert_layout(
            null_logit, A_LAYOUT
        )  # real mass against the null, base 2
        w_real = 1.0 / (1.0 + gl.exp2(-gap))
        w_null = 1.0 / (1.0 + gl.exp2(gap))
        acc = acc * (w_real * inverse)[:, None]
        if NULL_VALUE:
            value = gl.load(null_value + head * WIDTH + cols, mask=cols < WIDTH, other=0.0)
            acc += w_null[:, None] * value.to(gl.float32)[None, :]
        norm = gl.sqrt(gl.sum(acc * acc, 1))
        acc = acc * (1.0 / gl.maximum(norm, EPS))[:, None]
        effective = gl.where(keyless, 1.0, l * l / gl.where(keyless, 1.0, s2))
        mass = gl.where(keyless, 0.0, effective * w_real)
        amount = _tanh(gain * _log1p(mass))
        at_count = (batch.to(gl.int64) * tq + rows) * heads_q + head
        gl.store(count + at_count, amount.to(count.dtype.element_ty), mask=inside)
        gl.store(n_eff + at_row, effective, mask=inside)
        gl.store(rho + at_row, norm, mask=inside)
        gl.store(null_mass + at_row, w_null, mask=inside)
    else:
        acc = acc * inverse[:, None]
    gl.store(lse + at_row, log_sum * LN2, mask=inside)
    at = ((batch.to(gl.int64) * tq + rows) * heads_q + head)[:, None] * WIDTH + cols[None, :]
    mask = inside[:, None] & (cols < WIDTH)[None, :]
    gl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=RUNTIME)
def attention_fwd(
    q, k, v, null_value, null_base, null_slope, length_gain, magnitude_gain,
    out, count, lse, n_eff, rho, null_mass,
    tq: gl.int32, tk: gl.int32, heads_q: gl.int32, group: gl.int32, window: gl.int32,
    scale: gl.float32,
    POLAR: gl.constexpr, NULL_VALUE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, EPS: gl.constexpr,
):  # fmt: skip
    """direction, count and statistics (POLAR), or out and lse, of one query tile of one head."""
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    row_tiles = (tq + BLOCK_M - 1) // BLOCK_M
    pid = gl.program_id(0)
    batch_head = pid // row_tiles
    batch = batch_head // heads_q
    head = batch_head % heads_q
    head_k = head // group
    row0 = (row_tiles - 1 - pid % row_tiles) * BLOCK_M  # the causal rows with most keys start first
    begin, full_end, right, masked, steps = _steps(
        row0, tq, tk, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N
    )

    q_tile = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, ROWS, BLOCK_D], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=CONSUMERS)
        mbarrier.init(v_free.index(stage), count=CONSUMERS)

    tiles = (q_tile, k_tiles, v_tiles, q_full, k_full, v_full, k_free, v_free)
    parameters = (null_value, null_base, null_slope, length_gain, magnitude_gain)
    results = (out, count, lse, n_eff, rho, null_mass)
    place = (batch, head, batch_head, row0, tq, tk, heads_q, window, scale)
    plan = (begin, full_end, right, masked, steps)
    # Written out: a tuple with compile-time values has to stand in the call itself.
    gl.warp_specialize(
        [
            (_consume, (
                0, tiles, parameters, results, place, plan,
                POLAR, NULL_VALUE, CAUSAL, WINDOW, WIDTH, BLOCK_N, BLOCK_D, STAGES, EPS,
            )),
            (_consume, (
                1, tiles, parameters, results, place, plan,
                POLAR, NULL_VALUE, CAUSAL, WINDOW, WIDTH, BLOCK_N, BLOCK_D, STAGES, EPS,
            )),
            (_produce, (
                q, k, v, tiles, batch, head, head_k, row0, begin, full_end, right, steps,
                BLOCK_N, BLOCK_D, STAGES,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
