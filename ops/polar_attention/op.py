"""What torch sees: shapes and checks, four operators, autograd and FLOPs. Knows no backend.

Two families share the kernels. `polar_attention` is the whole op; `softmax_attention` is the same
kernel with the null competitor and the count compiled out.

    polar_attention_fwd    -> direction, count, lse, n_eff, rho, null_mass
    polar_attention_bwd    -> dq, dk, dv, d null_value, d null_base, d null_slope, d length_gain,
                              d magnitude_gain
    softmax_attention_fwd  -> out, lse
    softmax_attention_bwd  -> dq, dk, dv

Statistics are fp32 (float64 for float64 inputs), laid out (B, Hq, Tq) so that kernels store them
coalesced; `direction` and `out` are (B, Tq, Hq, D), `count` is (B, Tq, Hq), all contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import checks, flops
from ..dispatch import Operator, declare, resolve

PACKAGE = __package__
EPS = 1e-6  # floor of ‖s‖ when the direction is formed
MAX_HEAD_DIM = 256


class NullParameters(NamedTuple):
    """The per-head parameters of Polar attention, effective values (softplus is the layer's)."""

    value: torch.Tensor | None  # (Hq, D); None is zeros
    base: torch.Tensor  # (Hq,)
    slope: torch.Tensor  # (Hq,)
    length_gain: torch.Tensor  # (Hq,)
    magnitude_gain: torch.Tensor  # (Hq,)


class Lengths(NamedTuple):
    """Integer tensors that say which keys a row sees; None where the rule needs none."""

    n_keys: torch.Tensor | None  # int32 (Tq,) or (B, Tq)
    cu_seqlens: torch.Tensor | None  # int32 (N+1,), queries
    cu_seqlens_k: torch.Tensor | None  # int32 (N+1,), keys; None is cu_seqlens


@dataclass(frozen=True)
class AttentionShape:
    """One call's sizes and rules: all that backends and config spaces may depend on.

    `sequences` is the number of packed sequences, None if not packed. `window` None means no
    window. `polar` False is softmax mode. `null_value` says whether there is a null value.
    `aligned`: q, k and v start and stride by multiples of 16 bytes.
    """

    polar: bool
    batch: int
    tq: int
    tk: int
    heads_q: int
    heads_k: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    causal: bool
    window: int | None
    has_n_keys: bool
    null_value: bool
    sequences: int | None
    max_seqlen: int | None
    max_seqlen_k: int | None
    aligned: bool = True

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads_q // self.heads_k

    @property
    def packed(self) -> bool:
        """Whether sequences are packed along T."""
        return self.sequences is not None

    @property
    def statistic_dtype(self) -> torch.dtype:
        """dtype of the saved statistics and of all accumulation."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def pairs(self) -> int:
        """Visible (query, key) pairs over the batch in one head.

        Packed calls are counted as N equal sequences of the hinted lengths (all T if no hint):
        the real lengths live on the device. `n_keys` counts as no restriction.
        """
        if self.sequences is None:
            return self.batch * self._pairs(self.tq, self.tk)
        if self.sequences == 0:
            return 0
        tq = self.tq // self.sequences
        tk = self.tk // self.sequences
        if self.max_seqlen is None:
            tq, tk = self.tq, self.tk
            return self._pairs(tq, tk)
        return self.sequences * self._pairs(tq, tk)

    def _pairs(self, tq: int, tk: int) -> int:
        causal = self.causal and not self.has_n_keys
        return flops.visible_pairs(tq, tk, causal=causal, window=self.window)


def attention_shape(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    null: NullParameters | None,
    lengths: Lengths,
    scale: float | None,
    causal: bool,
    window: int | None,
    max_seqlen: int | None,
    max_seqlen_k: int | None,
    concrete: bool = False,
) -> AttentionShape:
    """Check every argument of a call and return its shape. All raising happens here.

    `concrete` allows to ask tensors for their addresses, which a traced call must not.
    """
    checks.tensor(op, "q", q, "B Tq Hq D", checks.FLOATING)
    for name, x in (("k", k), ("v", v)):
        checks.tensor(op, name, x, "B Tk Hk D", checks.FLOATING)
        checks.same_dtype(op, name, x, q.dtype, "q")
        checks.same_device(op, name, x, q.device)
        checks.size(op, name, x, 0, q.shape[0], "the batch of q")
        checks.size(op, name, x, 3, q.shape[3], "the head width of q; Dv must equal D")
    checks.size(op, "v", v, 1, k.shape[1], "the tokens of k")
    checks.size(op, "v", v, 2, k.shape[2], "the heads of k")
    batch, tq, heads_q, head_dim = q.shape
    tk, heads_k = k.shape[1], k.shape[2]
    if heads_k == 0 or heads_q % heads_k:
        raise ValueError(
            f"{op}: q has {heads_q} heads, not a multiple of the {heads_k} heads of k and v"
        )
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"{op}: head width D of q is {head_dim}; supported: 1 to {MAX_HEAD_DIM}")
    checks.positive(op, "window", window)
    if scale is not None and not scale >= 0:
        raise ValueError(f"{op}: scale must be at least 0, got {scale}")
    if null is not None:
        _check_null(op, null, q)
    _check_lengths(op, lengths, q, k)
    sequences = None if lengths.cu_seqlens is None else lengths.cu_seqlens.shape[0] - 1
    return AttentionShape(
        polar=null is not None,
        batch=batch,
        tq=tq,
        tk=tk,
        heads_q=heads_q,
        heads_k=heads_k,
        head_dim=head_dim,
        dtype=q.dtype,
        device=q.device,
        scale=head_dim**-0.5 if scale is None else float(scale),
        causal=causal,
        window=window,
        has_n_keys=lengths.n_keys is not None,
        null_value=null is not None and null.value is not None,
        sequences=sequences,
        max_seqlen=max_seqlen,
        max_seqlen_k=max_seqlen_k,
        aligned=not concrete or all(map(checks.aligned, (q, k, v))),
    )


def _check_null(op: str, null: NullParameters, q: torch.Tensor) -> None:
    heads, head_dim = q.shape[2], q.shape[3]
    if null.value is not None:
        checks.tensor(op, "null_value", null.value, "Hq D", checks.FLOATING)
        checks.same_device(op, "null_value", null.value, q.device)
        checks.size(op, "null_value", null.value, 0, heads, "the heads of q")
        checks.size(op, "null_value", null.value, 1, head_dim, "the head width of q")
    scalars = {
        "null_base": null.base,
        "null_slope": null.slope,
        "length_gain": null.length_gain,
        "magnitude_gain": null.magnitude_gain,
    }
    for name, x in scalars.items():
        checks.tensor(op, name, x, "Hq", checks.FLOATING)
        checks.same_device(op, name, x, q.device)
        checks.size(op, name, x, 0, heads, "the heads of q")


def _check_lengths(op: str, lengths: Lengths, q: torch.Tensor, k: torch.Tensor) -> None:
    n_keys, cu_q, cu_k = lengths
    if n_keys is not None:
        layout = "B Tq" if isinstance(n_keys, torch.Tensor) and n_keys.ndim == 2 else "Tq"
        checks.tensor(op, "n_keys", n_keys, layout, (torch.int32,))
        checks.same_device(op, "n_keys", n_keys, q.device)
        checks.size(op, "n_keys", n_keys, n_keys.ndim - 1, q.shape[1], "the tokens of q")
        if n_keys.ndim == 2:
            checks.size(op, "n_keys", n_keys, 0, q.shape[0], "the batch of q")
    if cu_q is None:
        if cu_k is not None:
            raise ValueError(f"{op}: cu_seqlens_k was given without cu_seqlens")
        return
    checks.cu_seqlens(op, "cu_seqlens", cu_q, q.device, q.shape[0], q.shape[1])
    keys = cu_q if cu_k is None else cu_k
    checks.cu_seqlens(op, "cu_seqlens_k", keys, q.device, k.shape[0], k.shape[1])
    if keys.shape != cu_q.shape:
        raise ValueError(
            f"{op}: cu_seqlens_k has shape {tuple(keys.shape)}, cu_seqlens {tuple(cu_q.shape)}"
        )


# ---- operators ----------------------------------------------------------------------------------

_RULES = (
    "Tensor? n_keys, Tensor? cu_seqlens, Tensor? cu_seqlens_k, float scale, bool causal, "
    "SymInt? window, SymInt? max_seqlen, SymInt? max_seqlen_k, str backend"
)
_NULL = (
    "Tensor? null_value, Tensor null_base, Tensor null_slope, Tensor length_gain, "
    "Tensor magnitude_gain"
)


class _Call(NamedTuple):
    """The arguments of a forward operator, sorted: what every function below needs of them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    null: NullParameters | None
    lengths: Lengths
    shape: AttentionShape
    backend: str


def _polar_call(q: Any, k: Any, v: Any, *rest: Any) -> _Call:
    return _call(q, k, v, NullParameters(*rest[:5]), *rest[5:])


def _softmax_call(q: Any, k: Any, v: Any, *rest: Any) -> _Call:
    return _call(q, k, v, None, *rest)


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    null: NullParameters | None,
    n_keys: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    max_seqlen: int | None,
    max_seqlen_k: int | None,
    backend: str,
) -> _Call:
    """No checks: the public function made them, and the operators trust it."""
    shape = AttentionShape(
        polar=null is not None,
        batch=q.shape[0],
        tq=q.shape[1],
        tk=k.shape[1],
        heads_q=q.shape[2],
        heads_k=k.shape[2],
        head_dim=q.shape[3],
        dtype=q.dtype,
        device=q.device,
        scale=scale,
        causal=causal,
        window=window,
        has_n_keys=n_keys is not None,
        null_value=null is not None and null.value is not None,
        sequences=None if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        max_seqlen=max_seqlen,
        max_seqlen_k=max_seqlen_k,
        aligned=all(map(checks.aligned, (q, k, v))),
    )
    return _Call(q, k, v, null, Lengths(n_keys, cu_seqlens, cu_seqlens_k), shape, backend)


def _forward_impl(call: _Call) -> tuple[torch.Tensor, ...]:
    module = resolve(PACKAGE, call.shape, call.backend)
    return module.fwd(call.shape, call.q, call.k, call.v, call.null, call.lengths)


def _forward_fake(call: _Call) -> tuple[torch.Tensor, ...]:
    q, shape = call.q, call.shape
    out = q.new_empty(q.shape)
    statistics = (shape.batch, shape.heads_q, shape.tq)
    if not shape.polar:
        return out, q.new_empty(statistics, dtype=shape.statistic_dtype)
    count = q.new_empty((shape.batch, shape.tq, shape.heads_q))
    return (out, count, *(q.new_empty(statistics, dtype=shape.statistic_dtype) for _ in range(4)))


def _gradients_fake(call: _Call) -> tuple[torch.Tensor, ...]:
    grads = tuple(x.new_empty(x.shape) for x in (call.q, call.k, call.v))
    if call.null is None:
        return grads
    value, *scalars = call.null
    d_value = scalars[0].new_empty(0) if value is None else value.new_empty(value.shape)
    return (*grads, d_value, *(x.new_empty(x.shape) for x in scalars))


def _forward_flops(call: _Call) -> int:
    return flops.attention_forward(call.shape.pairs(), call.shape.head_dim, call.shape.heads_q)


def _backward_flops(call: _Call) -> int:
    return flops.attention_backward(call.shape.pairs(), call.shape.head_dim, call.shape.heads_q)


# The backward operators take the upstream gradients and saved results first, then the arguments of
# the forward operator: 6 tensors in Polar mode, 4 in softmax mode.


def _polar_bwd_impl(*args: Any) -> tuple[torch.Tensor, ...]:
    d_direction, d_count, direction, lse, n_eff, rho = args[:6]
    call = _polar_call(*args[6:])
    module = resolve(PACKAGE, call.shape, call.backend)
    return module.bwd(
        call.shape, d_direction, d_count, call.q, call.k, call.v, call.null, call.lengths,
        direction, lse, n_eff, rho,
    )  # fmt: skip


def _softmax_bwd_impl(*args: Any) -> tuple[torch.Tensor, ...]:
    d_out, d_lse, out, lse = args[:4]
    call = _softmax_call(*args[4:])
    module = resolve(PACKAGE, call.shape, call.backend)
    return module.bwd(
        call.shape, d_out, d_lse, call.q, call.k, call.v, None, call.lengths, out, lse, None, None
    )


POLAR_BWD = declare(
    Operator(
        "polar_attention_bwd",
        "(Tensor d_direction, Tensor d_count, Tensor direction, Tensor lse, Tensor n_eff, "
        f"Tensor rho, Tensor q, Tensor k, Tensor v, {_NULL}, {_RULES}) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        impl=_polar_bwd_impl,
        fake=lambda *args: _gradients_fake(_polar_call(*args[6:])),
        flops=lambda *args, **kwargs: _backward_flops(_polar_call(*args[6:])),
    )
)

SOFTMAX_BWD = declare(
    Operator(
        "softmax_attention_bwd",
        "(Tensor d_out, Tensor d_lse, Tensor out, Tensor lse, "
        f"Tensor q, Tensor k, Tensor v, {_RULES}) -> (Tensor, Tensor, Tensor)",
        impl=_softmax_bwd_impl,
        fake=lambda *args: _gradients_fake(_softmax_call(*args[4:])),
        flops=lambda *args, **kwargs: _backward_flops(_softmax_call(*args[4:])),
    )
)


def _polar_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    direction, _, lse, n_eff, rho, _ = output
    ctx.save_for_backward(*inputs[:11], direction, lse, n_eff, rho)
    ctx.rules = inputs[11:]
    ctx.mark_non_differentiable(*output[2:])


def _polar_backward(ctx: Any, d_direction: Any, d_count: Any, *_: Any) -> tuple[Any, ...]:
    *tensors, direction, lse, n_eff, rho = ctx.saved_tensors
    grads = POLAR_BWD(d_direction, d_count, direction, lse, n_eff, rho, *tensors, *ctx.rules)
    dq, dk, dv, d_value, *d_scalars = grads
    if tensors[3] is None:
        d_value = None
    return (dq, dk, dv, d_value, *d_scalars, *[None] * 9)


def _softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.rules = inputs[6:]


def _softmax_backward(ctx: Any, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    grads = SOFTMAX_BWD(d_out, d_lse, out, lse, *tensors, *ctx.rules)
    return (*grads, *[None] * 9)


POLAR_FWD = declare(
    Operator(
        "polar_attention_fwd",
        f"(Tensor q, Tensor k, Tensor v, {_NULL}, {_RULES}) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        impl=lambda *args: _forward_impl(_polar_call(*args)),
        fake=lambda *args: _forward_fake(_polar_call(*args)),
        flops=lambda *args, **kwargs: _forward_flops(_polar_call(*args)),
    ),
    setup_context=_polar_setup,
    backward=_polar_backward,
)

SOFTMAX_FWD = declare(
    Operator(
        "softmax_attention_fwd",
        f"(Tensor q, Tensor k, Tensor v, {_RULES}) -> (Tensor, Tensor)",
        impl=lambda *args: _forward_impl(_softmax_call(*args)),
        fake=lambda *args: _forward_fake(_softmax_call(*args)),
        flops=lambda *args, **kwargs: _forward_flops(_softmax_call(*args)),
    ),
    setup_context=_softmax_setup,
    backward=_softmax_backward,
)
