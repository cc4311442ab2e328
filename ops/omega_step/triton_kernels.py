"""A token of the Omega rule on one memory of a cache, which is read once.

A chunk that is full was folded into its memory before, by `omega_fold`. A program has one row and
one head: what it writes, no other one reads. Only `filled` and `tail_length` are shared, by the
heads of a row. These count themselves off in the upper half of `filled` when they have read both,
and the last one writes what follows.

Letters are those of `omega.eager`: P and U are the weights of rows, A, a and B the decays.
"""

import triton
import triton.language as tl

ARRIVED = tl.constexpr(1 << 16)  # in `filled`: a head that is done; what is below it are tokens
LINEAR, SQUARE = tl.constexpr(1 / 1.5), tl.constexpr(0.5 / 1.5)  # default features
RUNTIME = (
    "heads", "width", "window", "chunk", "stride_powers",
    "stride_q_n", "stride_q_h", "stride_k_n", "stride_k_h", "stride_v_n", "stride_v_h",
    "stride_state_n", "stride_state_h", "stride_state_r",
    "stride_velocity_n", "stride_velocity_h", "stride_velocity_r",
    "stride_keys_n", "stride_keys_r", "stride_keys_h",
    "stride_values_n", "stride_values_r", "stride_values_h",
    "stride_residuals_n", "stride_residuals_r", "stride_residuals_h",
    "stride_write_n", "stride_write_h", "stride_write_r",
    "stride_push_n", "stride_push_h", "stride_push_r",
    "stride_rate_n", "stride_rate_h", "stride_carry_n", "stride_carry_h",
    "stride_drop_n", "stride_drop_h", "stride_tail_n", "stride_filled_n",
)  # fmt: skip


@triton.jit
def _of(x, n, head, stride_n, stride_h):
    """Where a head of row or slot n begins."""
    return x + (n * stride_n + head * stride_h)


@triton.jit
def _line(x, i, ALIGNED: tl.constexpr):
    """Pointers to elements `i` of a row that starts at x."""
    if ALIGNED:
        return tl.multiple_of(x + i, 16)
    return x + i


@triton.jit
def _tile(x, rows, cols, stride, ALIGNED: tl.constexpr):
    """Pointers to [rows, cols] of a matrix that starts at x, whose rows are `stride` apart."""
    pointers = x + (rows.to(tl.int64)[:, None] * stride + cols[None, :])
    if ALIGNED:
        pointers = tl.multiple_of(pointers, (16, 16))
    return pointers


@triton.jit
def _rows(x, r0, block, cols, there, known, stride, ALIGNED: tl.constexpr):
    """Rows r0 + block of a matrix that starts at x, zeros where there are none."""
    pointers = _tile(x + r0 * stride, block, cols, stride, ALIGNED)
    return tl.load(pointers, mask=there[:, None] & known[None, :], other=0.0)


@triton.jit
def _features(x, inside, powers, POWERS: tl.constexpr, GIVEN: tl.constexpr):
    """φ(x), rounded as x is, in fp32; 0 where there is no column."""
    wide = x.to(tl.float32)
    if POWERS > 0:
        total = tl.zeros_like(wide)
        if GIVEN:
            for r in tl.static_range(POWERS):
                total = total * wide + tl.load(powers + (POWERS - 1 - r))
        else:
            total = (SQUARE * wide + LINEAR) * wide
        wide = tl.where(inside, total.to(x.dtype).to(tl.float32), 0.0)
    return wide


@triton.jit
def _vector(
    x, d, powers, WIDTH: tl.constexpr, POWERS: tl.constexpr, GIVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Elements d of φ of the row that starts at x."""
    raw = tl.load(_line(x, d, ALIGNED), mask=d < WIDTH, other=0.0)
    return _features(raw, d < WIDTH, powers, POWERS, GIVEN)


@triton.jit
def _weights(
    write, push, gates, rows, place, there, near, alpha, theta, size, window,
    stride_write_r, stride_push_r, GATES: tl.constexpr, MOMENTUM: tl.constexpr,
):  # fmt: skip
    """P of some rows before the token, P and U after it.

    There are weights before it where `there` holds; `near` are the rows in the window of the
    token, whose own row is `place`.
    """
    before = tl.load(write + rows * stride_write_r, mask=there, other=0.0)
    pushed = tl.where(near, size / window, 0.0)
    if GATES:
        pushed = size * tl.load(gates + (place - rows), mask=near, other=0.0)
    if MOMENTUM:
        pushed += theta * tl.load(push + rows * stride_push_r, mask=there, other=0.0)
    return before, alpha * before + pushed, pushed


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _move_up(
    x, cols, older, chunk, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """The last `older` rows of x become the first; a barrier before each store, for they overlap
    where a window is longer than a chunk.
    """
    for r0 in tl.range(0, older, ROWS):
        rows = r0 + tl.arange(0, ROWS)
        mask = (rows < older)[:, None] & (cols < WIDTH)[None, :]
        moved = tl.load(_tile(x, rows + chunk, cols, stride, ALIGNED), mask=mask)
        tl.debug_barrier()
        tl.store(_tile(x, rows, cols, stride, ALIGNED), moved, mask=mask)
    tl.debug_barrier()


@triton.jit(do_not_specialize=RUNTIME)
def omega_step(
    q, k, v, slots, step, decay, window_gates, momentum, powers,
    state, velocity, keys, values, residuals, write, push, rate, carry, drop, tail, filled, y,
    heads: tl.int32, width: tl.int32, window: tl.int32, chunk: tl.int32, stride_powers: tl.int32,
    stride_q_n: tl.int64, stride_q_h: tl.int64, stride_k_n: tl.int64, stride_k_h: tl.int64,
    stride_v_n: tl.int64, stride_v_h: tl.int64,
    stride_state_n: tl.int64, stride_state_h: tl.int64, stride_state_r: tl.int64,
    stride_velocity_n: tl.int64, stride_velocity_h: tl.int64, stride_velocity_r: tl.int64,
    stride_keys_n: tl.int64, stride_keys_r: tl.int64, stride_keys_h: tl.int64,
    stride_values_n: tl.int64, stride_values_r: tl.int64, stride_values_h: tl.int64,
    stride_residuals_n: tl.int64, stride_residuals_r: tl.int64, stride_residuals_h: tl.int64,
    stride_write_n: tl.int64, stride_write_h: tl.int64, stride_write_r: tl.int64,
    stride_push_n: tl.int64, stride_push_h: tl.int64, stride_push_r: tl.int64,
    stride_rate_n: tl.int64, stride_rate_h: tl.int64,
    stride_carry_n: tl.int64, stride_carry_h: tl.int64,
    stride_drop_n: tl.int64, stride_drop_h: tl.int64,
    stride_tail_n: tl.int64, stride_filled_n: tl.int64,
    DOT: tl.constexpr, DECAY: tl.constexpr, GATES: tl.constexpr, MOMENTUM: tl.constexpr,
    BEFORE: tl.constexpr, POWERS: tl.constexpr, GIVEN: tl.constexpr, ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """One row and head. y is contiguous, as gates and slots are; POWERS is 0 for the identity.

    Rows of M, then those of the open chunk, come ROWS at a time, STAGES blocks of them in flight,
    and are summed in fp32: there is one query. SPAN weights are renewed at a time.
    """
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    slot = tl.load(slots + row)
    gate = row * heads + head
    e = tl.arange(0, V)
    known = e < VALUES
    if slot < 0:
        tl.store(y + (gate * VALUES + e), tl.zeros([V], y.dtype.element_ty), mask=known)
    else:
        if GIVEN:
            powers += head * stride_powers
        older = window - 1
        count = tl.load(filled + slot * stride_filled_n) & (ARRIVED - 1)
        length = tl.load(tail + slot * stride_tail_n)
        first = older - length  # of the rows that exist
        full = count == chunk  # and folded: M and S are those of a new chunk

        # The token in the scalars of its chunk.
        q = _of(q, row, head, stride_q_n, stride_q_h)
        k = _of(k, row, head, stride_k_n, stride_k_h)
        d = tl.arange(0, D)
        block = tl.arange(0, ROWS)
        gates = window_gates
        if GATES:
            gates += gate * window
        size = tl.load(step + gate)
        old_rate = tl.where(full, 1.0, tl.load(_of(rate, slot, head, stride_rate_n, stride_rate_h)))
        alpha = 1.0
        if DECAY:
            alpha = tl.load(decay + gate)
        new_rate = alpha * old_rate
        theta = 1.0
        old_carry = 0.0
        new_carry = 0.0
        new_drop = 0.0
        if MOMENTUM:
            theta = tl.load(momentum + gate)
            old_carry = tl.load(_of(carry, slot, head, stride_carry_n, stride_carry_h))
            old_carry = tl.where(full, 0.0, old_carry)
            old_drop = tl.load(_of(drop, slot, head, stride_drop_n, stride_drop_h))
            new_drop = theta * tl.where(full, 1.0, old_drop)
            new_carry = alpha * old_carry + new_drop
        seen_rate = old_rate if BEFORE else new_rate
        seen_carry = old_carry if BEFORE else new_carry

        # M and S. That `width` is no constant keeps the loop one: unrolled, all of M would be held
        # until its sums are needed.
        memory = _of(state, slot, head, stride_state_n, stride_state_h)
        impulse = memory
        if MOMENTUM:
            impulse = _of(velocity, slot, head, stride_velocity_n, stride_velocity_h)
        of_query = tl.zeros([ROWS, V], tl.float32)
        of_key = of_query
        for d0 in tl.range(0, width, ROWS, num_stages=STAGES):
            there = block < ROWS
            if WIDTH % ROWS > 0:
                there = d0 + block < WIDTH
            qt = _vector(q, d0 + block, powers, WIDTH, POWERS, GIVEN, ALIGNED)  # [ROWS]
            M = _rows(memory, d0, block, e, there, known, stride_state_r, ALIGNED)
            of_query += (seen_rate * qt)[:, None] * M
            if not DOT:
                kt = _vector(k, d0 + block, powers, WIDTH, POWERS, GIVEN, ALIGNED)
                of_key += kt[:, None] * M
            if MOMENTUM:
                S = _rows(impulse, d0, block, e, there, known, stride_velocity_r, ALIGNED)
                of_query += (seen_carry * qt)[:, None] * S

        # Rows of the open chunk, if there are any.
        begins = full | (count == 0)
        place = older + tl.where(full, 0, count)  # the token's row
        end = tl.where(begins, first, place)
        keys_here = _of(keys, slot, head, stride_keys_n, stride_keys_h)
        residuals_here = _of(residuals, slot, head, stride_residuals_n, stride_residuals_h)
        write_here = _of(write, slot, head, stride_write_n, stride_write_h)
        push_here = write_here
        if MOMENTUM:
            push_here = _of(push, slot, head, stride_push_n, stride_push_h)
        qt = _vector(q, d, powers, WIDTH, POWERS, GIVEN, ALIGNED)  # [D]
        for r0 in tl.range(first, end, ROWS, num_stages=STAGES):
            rows = r0 + block
            there = rows < place
            kr = _rows(keys_here, r0, block, d, there, d < WIDTH, stride_keys_r, ALIGNED)
            error = _rows(residuals_here, r0, block, e, there, known, stride_residuals_r, ALIGNED)
            before, after, _ = _weights(
                write_here, push_here, gates, rows, place, there, there & (place - rows < window),
                alpha, theta, size, window, stride_write_r, stride_push_r, GATES, MOMENTUM,
            )  # fmt: skip
            kr = _features(kr, (d < WIDTH)[None, :], powers, POWERS, GIVEN)
            part = (before if BEFORE else after) * tl.sum(kr * qt[None, :], 1)  # [ROWS]
            of_query -= part[:, None] * error

        # Older keys meet the memory that a chunk begins with.
        late = tl.zeros([V], tl.float32)
        if begins:
            keys_here = _of(keys, slot, head, stride_keys_n, stride_keys_h)
            values_here = _of(values, slot, head, stride_values_n, stride_values_h)
            memory = _of(state, slot, head, stride_state_n, stride_state_h)
            up = tl.where(full, chunk, 0)  # rows by which they move below
            length = tl.minimum(length + up, older)
            for r in tl.range(older - length, older):
                key = keys_here + (up + r) * stride_keys_r
                value = _line(values_here + (up + r) * stride_values_r, e, ALIGNED)
                error = -tl.load(value, mask=known, other=0.0).to(tl.float32)
                if not DOT:
                    of_row = tl.zeros([ROWS, V], tl.float32)
                    for d0 in tl.range(0, width, ROWS):
                        kr = _vector(key, d0 + block, powers, WIDTH, POWERS, GIVEN, ALIGNED)
                        there = d0 + block < WIDTH
                        M = _rows(memory, d0, block, e, there, known, stride_state_r, ALIGNED)
                        of_row += kr[:, None] * M
                    error += tl.sum(of_row, 0)
                if not BEFORE:
                    part = size / window
                    if GATES:
                        part = size * tl.load(gates + (older - r))
                    kr = _vector(key, d, powers, WIDTH, POWERS, GIVEN, ALIGNED)
                    late += (part * tl.sum(kr * qt, 0)) * error
                to = _line(residuals_here + r * stride_residuals_r, e, ALIGNED)
                tl.store(to, error, mask=known)

        # The token's own row.
        v = _of(v, row, head, stride_v_n, stride_v_h)
        error = -tl.load(_line(v, e, ALIGNED), mask=known, other=0.0).to(tl.float32)
        if DOT:
            read = tl.sum(of_query, 0)  # [V]
        else:
            read, found = tl.reduce((of_query, of_key), 0, _both)
            error += found
        if not BEFORE:
            part = size / window
            if GATES:
                part = size * tl.load(gates)
            kt = _vector(k, d, powers, WIDTH, POWERS, GIVEN, ALIGNED)
            read -= late + (part * tl.sum(kt * qt, 0)) * error
        to = _line(residuals_here + place * stride_residuals_r, e, ALIGNED)
        tl.store(to, error, mask=known)
        tl.store(y + (gate * VALUES + e), read.to(y.dtype.element_ty), mask=known)

        tl.debug_barrier()  # all threads have read what is written from here on
        keys_here = _of(keys, slot, head, stride_keys_n, stride_keys_h)
        values_here = _of(values, slot, head, stride_values_n, stride_values_h)
        if full:
            _move_up(keys_here, d, older, chunk, stride_keys_r, WIDTH, ROWS, ALIGNED)
            _move_up(values_here, e, older, chunk, stride_values_r, VALUES, ROWS, ALIGNED)
        key = tl.load(_line(k, d, ALIGNED), mask=d < WIDTH)
        tl.store(_line(keys_here + place * stride_keys_r, d, ALIGNED), key, mask=d < WIDTH)
        value = tl.load(_line(v, e, ALIGNED), mask=known)
        tl.store(_line(values_here + place * stride_values_r, e, ALIGNED), value, mask=known)
        write_here = _of(write, slot, head, stride_write_n, stride_write_h)
        push_here = write_here
        if MOMENTUM:
            push_here = _of(push, slot, head, stride_push_n, stride_push_h)
        # A fold leaves no weight; else there are none behind the token's.
        end = tl.where(full, older + chunk, place + 1)
        for r0 in tl.range(tl.where(full, 0, first), end, SPAN):
            rows = r0 + tl.arange(0, SPAN)
            there = (rows < place) & (full == 0)
            near = (rows >= older - length) & (rows <= place) & (place - rows < window)
            _, after, pushed = _weights(
                write_here, push_here, gates, rows, place, there, near, alpha, theta, size, window,
                stride_write_r, stride_push_r, GATES, MOMENTUM,
            )  # fmt: skip
            tl.store(write_here + rows * stride_write_r, after, mask=rows < end)
            if MOMENTUM:
                tl.store(push_here + rows * stride_push_r, pushed, mask=rows < end)
        tl.store(_of(rate, slot, head, stride_rate_n, stride_rate_h), new_rate)
        if MOMENTUM:
            tl.store(_of(carry, slot, head, stride_carry_n, stride_carry_h), new_carry)
            tl.store(_of(drop, slot, head, stride_drop_n, stride_drop_h), new_drop)
        counter = filled + slot * stride_filled_n
        if tl.atomic_add(counter, ARRIVED) >= (heads - 1) * ARRIVED:
            tl.store(counter, place - older + 1)
            tl.store(tail + slot * stride_tail_n, length)
