"""Forward kernel for Hopper, in Gluon: the same online softmax with the pipeline written out.

    producer (1 warp)      TMA: the q of a tile, then its k and v tiles of BLOCK_N keys, STAGES deep
    consumer 0, 1 (4 warps each, 64 rows each)
        step i:  S_i = q·k_iᵀ and acc += P_{i−1}·v_{i−1} start together, so that the tensor cores
                 have the one while S_i is read, and the other consumer's while both exponentiate

    k_full, v_full [STAGES]  completed by the copies     k_free, v_free [STAGES]  all consumers
    q_full, q_free [BUFFERS]                             the same of q

A head is CHUNKS of CHUNK columns, each a tile of its own in shared memory and in the accumulators:
a width of 192 is no 256.

One program a multiprocessor serves tile after tile (`hopper_common.draw`): the next tile's q, and
its first k and v, arrive while this one's results are formed and stored.

The compiler's own pipeliner waits for each product at once and makes all warps meet for each copy,
which is what this file is for. Making the consumers take turns, or holding the second wait back
until the exponentials are through, was measured and gained nothing.

Serves calls without n_keys whose tensors TMA can address. Steps that need masks come first: the
right edge from full_end on, then the left one; a softmax does not mind the order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common import LN2, LOG2E, key_bounds, key_range, log1p, tanh
from .hopper_common import (
    CONSUMERS,
    ROWS,
    clear_rows,
    draw,
    hide,
    hold,
    new_barriers,
    new_turns,
    place_rows,
    store_rows,
    take,
    wait_chunks,
    zero_chunks,
)

RUNTIME = ("tq", "tk", "heads_q", "group", "sequences", "window", "tiles", "together", "scale")

SLACK = gl.constexpr(8.0)  # by how much, in base 2, a running maximum may fall behind


@gluon.jit
def _steps(row0, tq, tk, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
           BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):  # fmt: skip
    """(begin, full_end, right, masked, steps) of a query tile.

    Step i < right starts at key full_end + i·BLOCK_N, a later one at begin + (i − right)·BLOCK_N;
    the first `masked` need masks.
    """
    begin, full, full_end, end = key_bounds(
        row0, row0, row0, tq, tk, row0, window, CAUSAL, False, WINDOW, BLOCK_M, BLOCK_N
    )
    right = gl.maximum((end - full_end + BLOCK_N - 1) // BLOCK_N, 0)
    masked = right + (full - begin) // BLOCK_N
    steps = right + (full_end - begin) // BLOCK_N
    return begin, full_end, right, masked, steps


@gluon.jit
def _key_of(step, begin, full_end, right, BLOCK_N: gl.constexpr):
    return gl.where(step < right, full_end + step * BLOCK_N, begin + (step - right) * BLOCK_N)


@gluon.jit
def _copy(
    x, batch, head, row, tiles, stage, ready,
    BLOCK_N: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(ready, BLOCK_N * CHUNK * CHUNKS * 2)
    for c in gl.static_range(CHUNKS):
        at = [batch, head, row, c * CHUNK]
        tma.async_copy_global_to_shared(x, at, ready, tiles.index(stage * CHUNKS + c))


@gluon.jit
def _produce(
    q, k, v, buffers, turns, sizes, cu_q, cu_k,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
    BLOCK_N: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    q_tiles, k_tiles, v_tiles, q_full, q_free, k_full, v_full, k_free, v_free, copied = buffers
    all_rows, all_keys, heads_q, group, sequences, window, tiles, together = sizes
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    BYTES: gl.constexpr = CHUNK * CHUNKS * 2  # of a row of one operand
    i = all_rows * 0
    cleared = all_rows * 0
    n = all_rows * 0
    number = gl.program_id(0)
    while number < tiles:
        after = draw(turns, n)
        batch, head, _tile, sequence, row0, first_row, first_key, tq, tk = place_rows(
            number, sizes, cu_q, cu_k, PACKED
        )
        begin, full_end, right, masked, steps = _steps(
            row0, tq, tk, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N
        )
        buffer = n % BUFFERS
        mbarrier.wait(q_free.index(buffer), ((n // BUFFERS) & 1) ^ 1)
        mbarrier.expect(q_full.index(buffer), BLOCK_M * BYTES)
        for who in gl.static_range(CONSUMERS):
            for c in gl.static_range(CHUNKS):
                tma.async_copy_global_to_shared(
                    q, [batch, head, first_row + row0 + who * ROWS, c * CHUNK],
                    q_full.index(buffer), q_tiles.index((buffer * CONSUMERS + who) * CHUNKS + c),
                )  # fmt: skip
        for step in range(steps):
            j = _key_of(step, begin, full_end, right, BLOCK_N)
            row = first_key + j
            stage = i % STAGES
            phase = (i // STAGES) & 1
            mbarrier.wait(k_free.index(stage), phase ^ 1)
            head_k = head // group
            _copy(
                k, batch, head_k, row, k_tiles, stage, k_full.index(stage), BLOCK_N, CHUNK, CHUNKS
            )
            mbarrier.wait(v_free.index(stage), phase ^ 1)
            if PACKED and j + BLOCK_N > tk:
                # Rows of the next sequence have no weight, but 0·NaN is NaN.
                _copy(v, batch, head_k, row, v_tiles, stage, copied, BLOCK_N, CHUNK, CHUNKS)
                mbarrier.wait(copied, cleared & 1)
                for c in gl.static_range(CHUNKS):
                    clear_rows(v_tiles.index(stage * CHUNKS + c), tk - j, BLOCK_N, CHUNK)
                mbarrier.arrive(v_full.index(stage), count=1)
                cleared += 1
            else:
                ready = v_full.index(stage)
                _copy(v, batch, head_k, row, v_tiles, stage, ready, BLOCK_N, CHUNK, CHUNKS)
            i += 1
        number = after
        n += 1


@gluon.jit
def _softmax(s, m, l, s2, rate, j, low, high, COUNT: gl.constexpr, MASKED: gl.constexpr,
             BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr):  # fmt: skip
    """One step of the online softmax: weights, α and the new running values."""
    if MASKED:
        at = j + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))
        s = hide(s * rate[:, None], at[None, :], low[:, None], (high - low)[:, None])
        m_new = gl.maximum(m, gl.max(s, 1))
        # A row that has seen no key yet keeps −inf; shifting by 0 keeps its p at 0, not NaN.
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(s - shift[:, None])
        alpha = gl.exp2(m - shift)
    else:
        # A maximum that grows by less than SLACK stays: p ≤ 2^SLACK, and no row is rescaled.
        m_new = gl.max(s, 1) * rate
        m_new = gl.where(m_new > m + SLACK, m_new, m)
        p = gl.exp2(s * rate[:, None] - m_new[:, None])
        alpha = gl.exp2(m - m_new)
    # Sums of the unrounded p, here: from the rounded one behind the products they cost 8 % more.
    l = l * alpha + gl.sum(p, 1)
    if COUNT:
        s2 = s2 * (alpha * alpha) + gl.sum(p * p, 1)
    return p, alpha, m_new, l, s2


@gluon.constexpr_function
def _rescale_asm(count):
    """PTX of x·α on `count` pairs, which a warp skips where α is 1 in all its threads.

    The outputs are $0 …, x is $count …, α is $(2·count) …; a thread holds two rows of the tile, in
    pairs of columns by turns, so that its first four α tell both.
    """
    keep = [f"mov.f32 ${i}, ${count + i};" for i in range(count)]
    multiply = [f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)]
    one, other = 2 * count, 2 * count + 2
    return "\n".join(
        [
            "{ .reg .pred mine, any;",
            f"setp.ne.f32 mine, ${one}, 0f3F800000;",
            f"setp.ne.or.f32 mine, ${other}, 0f3F800000, mine;",
            "vote.sync.any.pred any, mine, 0xffffffff;",
            *keep,
            "@!any bra SKIP_${:uid};",
            *multiply,
            "SKIP_${:uid}: }",
        ]
    )


@gluon.constexpr_function
def _rescale_operands(count):
    return ",".join(["=&f"] * count + ["f"] * (2 * count))


@gluon.jit
def _rescale(acc, alpha, CHUNK: gl.constexpr):
    """acc·α; as a rule α is 1 (see SLACK), and a warp for whose rows it is multiplies nothing."""
    COUNT: gl.constexpr = CHUNK // 2  # elements of a thread
    return gl.inline_asm_elementwise(
        _rescale_asm(COUNT),
        _rescale_operands(COUNT),
        [acc, alpha[:, None]],
        gl.float32,
        is_pure=True,
        pack=COUNT,
    )


@gluon.jit
def _scores(
    q_tiles, k_tiles, mine, stage,
    BLOCK_N: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start q·kᵀ."""
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    for c in gl.static_range(CHUNKS):
        query = q_tiles.index(mine * CHUNKS + c).reshape([ROWS, CHUNK])
        key = k_tiles.index(stage * CHUNKS + c).reshape([BLOCK_N, CHUNK])
        s = warpgroup_mma(query, key.permute((1, 0)), s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def _weigh(
    p, v_tiles, stage, acc, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr
):
    """Start acc + p·v."""
    products = ()
    for c in gl.static_range(CHUNKS):
        value = v_tiles.index(stage * CHUNKS + c).reshape([BLOCK_N, CHUNK])
        products += (warpgroup_mma(p, value, acc[c], is_async=True),)
    return products


@gluon.jit
def _consume_step(
    i, last, step, acc, weight, m, l, s2, rate, low, high, mine, buffers, plan,
    COUNT: gl.constexpr, MASKED: gl.constexpr, BLOCK_N: gl.constexpr,
    CHUNK: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Step `step` of a tile, the i-th of the program; `last` was the one before."""
    q_tiles, k_tiles, v_tiles, q_full, q_free, k_full, v_full, k_free, v_free, copied = buffers
    begin, full_end, right, masked, steps = plan
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    # Rounded here, not at the end of the step before: carried as 16-bit numbers, the halves of each
    # register change places twice on the way round the loop.
    p = gl.convert_layout(weight.to(k_tiles.dtype), P_LAYOUT)
    stage = i % STAGES
    phase = (i // STAGES) & 1
    before = last % STAGES
    phase_before = (last // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    mbarrier.wait(v_full.index(before), phase_before)
    s = _scores(q_tiles, k_tiles, mine, stage, BLOCK_N, CHUNK, CHUNKS, S_LAYOUT)
    acc = _weigh(p, v_tiles, before, acc, BLOCK_N, CHUNK, CHUNKS)
    s = warpgroup_mma_wait(CHUNKS, deps=[s])
    mbarrier.arrive(k_free.index(stage), count=1)
    j = _key_of(step, begin, full_end, right, BLOCK_N)
    weight, alpha, m, l, s2 = _softmax(
        s, m, l, s2, rate, j, low, high, COUNT, MASKED, BLOCK_N, S_LAYOUT
    )
    acc = wait_chunks(acc)
    mbarrier.arrive(v_free.index(before), count=1)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))
    scaled = ()
    for c in gl.static_range(CHUNKS):
        if MASKED:
            scaled += (acc[c] * alpha[:, None],)
        else:
            scaled += (_rescale(acc[c], alpha, CHUNK),)
    return scaled, weight, m, l, s2


@gluon.jit
def _keys_of(first, tq, tk, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Where the keys that any of ROWS rows from `first` on sees begin and end.

    Rows past tq see none, but count as seeing all: nothing is passed by for them, see `_pass_by`.
    """
    low, _ = key_range(first, tq, tk, first, window, CAUSAL, False, WINDOW)
    end = gl.minimum(first + ROWS, tq) - 1
    _, high = key_range(end, tq, tk, end, window, CAUSAL, False, WINDOW)
    return low, gl.where(first < tq, high, tk)


@gluon.jit
def _pass_by(i, buffers, STAGES: gl.constexpr):
    """Let the i-th k and v go unread.

    They have to be there: a release ahead of the copy would count for the tile before. And the v of
    the last step read is still held, so STAGES steps passed by in a row would wait for themselves.
    No more than one ever is: halves of a row tile differ by ROWS keys at either edge, and steps
    that are passed by have at least as many.
    """
    q_tiles, k_tiles, v_tiles, q_full, q_free, k_full, v_full, k_free, v_free, copied = buffers
    stage = i % STAGES
    phase = (i // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    mbarrier.arrive(k_free.index(stage), count=1)
    mbarrier.wait(v_full.index(stage), phase)
    mbarrier.arrive(v_free.index(stage), count=1)


@gluon.jit
def _null_value(
    null_value, head, NULL_VALUE: gl.constexpr, WIDTH: gl.constexpr, CHUNK: gl.constexpr,
    CHUNKS: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The null value of a head in fp32, in chunks."""
    chunks = ()
    for c in gl.static_range(CHUNKS):
        value = gl.zeros([CHUNK], gl.float32, gl.SliceLayout(0, O_LAYOUT))
        if NULL_VALUE:
            cols = c * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, O_LAYOUT))
            value = gl.load(null_value + head * WIDTH + cols, mask=cols < WIDTH, other=0.0)
            value = value.to(gl.float32)
        chunks += (value,)
    return chunks


@gluon.jit
def _consume(
    WHO: gl.constexpr, buffers, turns, parameters, results, sizes, scale, cu_q, cu_k,
    POLAR: gl.constexpr, NULL_VALUE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    PACKED: gl.constexpr, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr,
    CHUNKS: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr, EPS: gl.constexpr,
):  # fmt: skip
    q_tiles, k_tiles, v_tiles, q_full, q_free, k_full, v_full, k_free, v_free, copied = buffers
    null_value, null_base, null_slope, length_gain, magnitude_gain = parameters
    out, count, lse, n_eff, rho, null_mass = results
    total, all_keys, heads_q, group, sequences, window, tiles, together = sizes
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    R_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    A_LAYOUT: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    base = total * 0  # steps of the tiles before
    n = total * 0
    number = gl.program_id(0)
    while number < tiles:
        batch, head, _tile, sequence, row0, first_row, first_key, tq, tk = place_rows(
            number, sizes, cu_q, cu_k, PACKED
        )
        padding = sequence == sequences
        plan = _steps(row0, tq, tk, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
        begin, full_end, right, masked, steps = plan
        rows = row0 + WHO * ROWS + gl.arange(0, ROWS, layout=R_LAYOUT)
        low, high = key_range(rows, tq, tk, rows, window, CAUSAL, False, WINDOW)
        length = gl.maximum(high - low, 1).to(gl.float32)
        t = gl.full([ROWS], 1.0, gl.float32, R_LAYOUT)
        if POLAR:
            # Everything the end needs of memory is fetched while the first tiles are on their way.
            t = 1.0 + gl.load(length_gain + head).to(gl.float32) * gl.log(length)
            log_n1 = gl.sqrt(gl.log(length + 1.0))
            nu = gl.load(null_base + head).to(gl.float32)
            nu += gl.load(null_slope + head).to(gl.float32) * log_n1
            null_logit = t * nu
            gain = gl.load(magnitude_gain + head).to(gl.float32)
        rate = t * (scale * LOG2E)

        m = gl.full([ROWS], float("-inf"), gl.float32, R_LAYOUT)
        l = gl.zeros([ROWS], gl.float32, R_LAYOUT)
        s2 = gl.zeros([ROWS], gl.float32, R_LAYOUT)
        acc = zero_chunks(CHUNKS, ROWS, CHUNK, O_LAYOUT)
        buffer = n % BUFFERS
        mine = buffer * CONSUMERS + WHO
        mbarrier.wait(q_full.index(buffer), (n // BUFFERS) & 1)
        if steps > 0:
            # The first step has no product of weights and values to start beside its scores.
            stage = base % STAGES
            mbarrier.wait(k_full.index(stage), (base // STAGES) & 1)
            s = _scores(q_tiles, k_tiles, mine, stage, BLOCK_N, CHUNK, CHUNKS, S_LAYOUT)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_free.index(stage), count=1)
            j = _key_of(0, begin, full_end, right, BLOCK_N)
            weight, _, m, l, s2 = _softmax(
                s, m, l, s2, rate, j, low, high, POLAR, True, BLOCK_N, S_LAYOUT
            )
            # Half a row tile may see nothing of a key tile that the other half sees, where the tile
            # is as small as its rows. Only then the step before may be another than the one read
            # last, which costs larger tiles the registers that they have not.
            PASSES: gl.constexpr = BLOCK_N == ROWS
            last = base
            first_mine = row0 + WHO * ROWS
            low_mine, high_mine = _keys_of(first_mine, tq, tk, window, CAUSAL, WINDOW)
            for step in range(1, masked):
                j = _key_of(step, begin, full_end, right, BLOCK_N)
                if PASSES and (j >= high_mine or j + BLOCK_N <= low_mine):
                    _pass_by(base + step, buffers, STAGES)
                else:
                    before = last if PASSES else base + step - 1
                    acc, weight, m, l, s2 = _consume_step(
                        base + step, before, step, acc, weight, m, l, s2, rate, low, high, mine,
                        buffers, plan, POLAR, True, BLOCK_N, CHUNK, CHUNKS, STAGES,
                        S_LAYOUT, O_LAYOUT,
                    )  # fmt: skip
                    last = base + step
            for step in range(gl.maximum(masked, 1), steps):
                before = last if PASSES else base + step - 1
                acc, weight, m, l, s2 = _consume_step(
                    base + step, before, step, acc, weight, m, l, s2, rate, low, high, mine,
                    buffers, plan, POLAR, False, BLOCK_N, CHUNK, CHUNKS, STAGES,
                    S_LAYOUT, O_LAYOUT,
                )  # fmt: skip
                last = base + step
            last = last if PASSES else base + steps - 1
            # Here, so that it arrives while the last product runs.
            null = _null_value(null_value, head, NULL_VALUE, WIDTH, CHUNK, CHUNKS, O_LAYOUT)
            stage = last % STAGES
            mbarrier.wait(v_full.index(stage), (last // STAGES) & 1)
            p = gl.convert_layout(weight.to(k_tiles.dtype), P_LAYOUT)
            acc = wait_chunks(_weigh(p, v_tiles, stage, acc, BLOCK_N, CHUNK, CHUNKS))
            mbarrier.arrive(v_free.index(stage), count=1)
        else:
            null = _null_value(null_value, head, NULL_VALUE, WIDTH, CHUNK, CHUNKS, O_LAYOUT)

        m = gl.convert_layout(m, A_LAYOUT)
        l = gl.convert_layout(l, A_LAYOUT)
        s2 = gl.convert_layout(s2, A_LAYOUT)
        rows = gl.convert_layout(rows, A_LAYOUT)
        keyless = l == 0.0
        inverse = 1.0 / gl.where(keyless, 1.0, l)
        log_sum = (m + gl.log2(l)) * LN2
        inside = rows < tq
        position = first_row + rows
        at_row = (batch * heads_q + head).to(gl.int64) * total + position
        at_head = (batch.to(gl.int64) * total + position) * heads_q + head
        if POLAR:
            # Real mass against the null, base 2; formed as backward forms it.
            gap = (log_sum - gl.convert_layout(null_logit, A_LAYOUT)) * LOG2E
            w_real = 1.0 / (1.0 + gl.exp2(-gap))
            w_null = 1.0 / (1.0 + gl.exp2(gap))
            directed = ()
            square = gl.zeros([ROWS], gl.float32, A_LAYOUT)
            for c in gl.static_range(CHUNKS):
                mixed = acc[c] * (w_real * inverse)[:, None]
                if NULL_VALUE:
                    mixed += w_null[:, None] * null[c][None, :]
                square += gl.sum(mixed * mixed, 1)
                directed += (mixed,)
            acc = directed
            norm = gl.sqrt(square)
            scaling = 1.0 / gl.maximum(norm, EPS)
            effective = gl.where(keyless, 1.0, l * l / gl.where(keyless, 1.0, s2))
            mass = gl.where(keyless, 0.0, effective * w_real)
            amount = tanh(gain * log1p(mass))
            if PACKED:
                amount = gl.where(padding, 0.0, amount)
                scaling = gl.where(padding, 0.0, scaling)
                effective = gl.where(padding, 0.0, effective)
                norm = gl.where(padding, 0.0, norm)
                w_null = gl.where(padding, 0.0, w_null)
            gl.store(count + at_head, amount.to(count.dtype.element_ty), mask=inside)
            gl.store(n_eff + at_row, effective, mask=inside)
            gl.store(rho + at_row, norm, mask=inside)
            gl.store(null_mass + at_row, w_null, mask=inside)
        else:
            scaling = inverse
        if PACKED:
            log_sum = gl.where(padding, 0.0, log_sum)
        gl.store(lse + at_row, log_sum, mask=inside)
        row = row0 + WHO * ROWS
        at = ((batch.to(gl.int64) * total + first_row + row) * heads_q + head) * WIDTH
        for c in gl.static_range(CHUNKS):
            store_rows(
                q_tiles.index(mine * CHUNKS + c).reshape([ROWS, CHUNK]),
                acc[c] * scaling[:, None], out, at + c * CHUNK, heads_q * WIDTH, tq - row,
                WIDTH - c * CHUNK, ROWS, CHUNK,
            )  # fmt: skip
        mbarrier.arrive(q_free.index(buffer), count=1)
        base += steps
        number = take(turns, n)
        n += 1


@gluon.jit(do_not_specialize=RUNTIME)
def attention_fwd(
    q, k, v, null_value, null_base, null_slope, length_gain, magnitude_gain, cu_q, cu_k, counter,
    out, count, lse, n_eff, rho, null_mass,
    tq: gl.int32, tk: gl.int32, heads_q: gl.int32, group: gl.int32, sequences: gl.int32,
    window: gl.int32, tiles: gl.int32, together: gl.int32, scale: gl.float32,
    POLAR: gl.constexpr, NULL_VALUE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    PACKED: gl.constexpr, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr,
    CHUNKS: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr, EPS: gl.constexpr,
):  # fmt: skip
    """direction, count and statistics (POLAR), or out and lse, of `tiles` query tiles."""
    OWN: gl.constexpr = BUFFERS * CONSUMERS * CHUNKS
    STREAMED: gl.constexpr = STAGES * CHUNKS
    q_tiles = gl.allocate_shared_memory(q.dtype, [OWN, 1, 1, ROWS, CHUNK], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STREAMED, 1, 1, BLOCK_N, CHUNK], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STREAMED, 1, 1, BLOCK_N, CHUNK], v.layout)
    copied = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(copied, count=1)
    q_full, q_free = new_barriers(BUFFERS)
    k_full, k_free = new_barriers(STAGES)
    v_full, v_free = new_barriers(STAGES)

    buffers = (q_tiles, k_tiles, v_tiles, q_full, q_free, k_full, v_full, k_free, v_free, copied)
    turns = new_turns(counter)
    parameters = (null_value, null_base, null_slope, length_gain, magnitude_gain)
    results = (out, count, lse, n_eff, rho, null_mass)
    sizes = (tq, tk, heads_q, group, sequences, window, tiles, together)
    # Written out: a tuple with compile-time values has to stand in the call itself.
    gl.warp_specialize(
        [
            (_consume, (
                0, buffers, turns, parameters, results, sizes, scale, cu_q, cu_k,
                POLAR, NULL_VALUE, CAUSAL, WINDOW, PACKED, WIDTH, BLOCK_N, CHUNK, CHUNKS, STAGES,
                BUFFERS, EPS,
            )),
            (_consume, (
                1, buffers, turns, parameters, results, sizes, scale, cu_q, cu_k,
                POLAR, NULL_VALUE, CAUSAL, WINDOW, PACKED, WIDTH, BLOCK_N, CHUNK, CHUNKS, STAGES,
                BUFFERS, EPS,
            )),
            (_produce, (
                q, k, v, buffers, turns, sizes, cu_q, cu_k,
                CAUSAL, WINDOW, PACKED, BLOCK_N, CHUNK, CHUNKS, STAGES, BUFFERS,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
    hold(copied)
