"""What torch sees: shapes and checks, and one operator that writes its caches. Knows no backend.

    paged_cache_write_  -> nothing; k_cache and v_cache (pages, page_size, Hk, D) are changed in
                           place

The operator has no gradient: the public function refuses tensors that require one, because what
it writes could not be followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch

from .. import checks
from ..dispatch import Operator, declare, resolve
from ..polar_decode.op import check_caches

PACKAGE = __package__


class WriteTensors(NamedTuple):
    """The tensors of a call, in the order in which the operator takes them."""

    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass(frozen=True)
class WriteShape:
    """One call's sizes: all that backends and config spaces may depend on.

    `aligned`: k, v and the caches start and stride by multiples of 16 bytes.
    """

    tokens: int
    heads: int
    head_dim: int
    pages: int
    page_size: int
    dtype: torch.dtype
    device: torch.device
    aligned: bool = True


def write_shape(op: str, given: WriteTensors, *, concrete: bool = False) -> WriteShape:
    """Check every argument of a call and return its shape. All raising happens here."""
    k, v, k_cache = given.k, given.v, given.k_cache
    checks.tensor(op, "k", k, "tokens Hk D", checks.FLOATING)
    checks.tensor(op, "v", v, "tokens Hk D", checks.FLOATING)
    checks.same_dtype(op, "v", v, k.dtype, "k")
    checks.same_device(op, "v", v, k.device)
    for dim, meaning in enumerate(("tokens", "heads", "head width")):
        checks.size(op, "v", v, dim, k.shape[dim], f"the {meaning} of k")
    check_caches(op, k_cache, given.v_cache, k, "k")
    checks.size(op, "k_cache", k_cache, 2, k.shape[1], "the heads of k")
    checks.slots(
        op, "slot_mapping", given.slot_mapping, k.device, k.shape[0],
        k_cache.shape[0] * k_cache.shape[1], of="k", dtypes=(torch.int64, torch.int32),
    )  # fmt: skip
    written = {"k_cache": k_cache, "v_cache": given.v_cache}
    checks.writable(op, given._asdict(), written, "use torch.index_put")
    return unchecked_shape(given, concrete=concrete)


def unchecked_shape(given: WriteTensors, *, concrete: bool) -> WriteShape:
    """The shape of a call that was checked."""
    tokens, heads, head_dim = given.k.shape
    return WriteShape(
        tokens=tokens,
        heads=heads,
        head_dim=head_dim,
        pages=given.k_cache.shape[0],
        page_size=given.k_cache.shape[1],
        dtype=given.k.dtype,
        device=given.k.device,
        aligned=not concrete or all(map(checks.aligned, given[:4])),
    )


# ---- operator -----------------------------------------------------------------------------------


def _impl(arguments: Sequence[Any]) -> None:
    """No checks: the public function made them, and the operator trusts it."""
    *tensors, backend = arguments
    given = WriteTensors(*tensors)
    shape = unchecked_shape(given, concrete=True)
    resolve(PACKAGE, shape, backend).fwd(shape, given)
    # A kernel writes behind torch's back: what autograd saved of a cache must be seen as changed.
    torch.autograd.graph.increment_version([given.k_cache, given.v_cache])


def _no_gradient(ctx: Any, *grads: torch.Tensor) -> NoReturn:
    raise RuntimeError("fastweights::paged_cache_write_ has no gradient; torch.index_put has")


WRITE = declare(
    Operator(
        "paged_cache_write_",
        "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
        "str backend) -> ()",
        impl=lambda *args: _impl(args),
        fake=lambda *args: None,
    ),
    backward=_no_gradient,
)
