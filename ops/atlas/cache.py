r"""The Atlas memory in pieces: what an open chunk keeps, and calls that end in the middle of one.

M and S are those of the chunk's begin. After its last token, with the O that it has written,

    S_t = B S − φ(K)ᵀ (U ∘ R)      R = φ(K) M − V      M_t = decay · (M as the last O left it)

("dot": R = −V), so that a token changes rows and scalars, and once in ns_stride tokens M_t.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import checks
from ..dispatch import autocast_operands, requested, without_autocast
from ..omega import OmegaState
from ..omega import cache as omega
from ..omega.cache import OmegaCache, Rows, check_fields, check_state, omega_cache, shape_of_rows
from ..omega.op import OmegaTensors
from .op import AtlasTensors, atlas_shape


class AtlasCache(NamedTuple):
    """Memories in the middle of a chunk: N of them, each of one sequence.

    `filled` tokens have joined the open chunk; at `filled` = chunk_size the next token begins
    another. Rows of keys, values and residuals that do not exist yet may hold anything, and
    momentum_write is 0 there.

    Attributes:
        state: M where the chunk began, at which its errors are taken, (N, H, D, Dv), fp32 (float64
            for float64).
        memory: M after the last token that wrote into it, as state.
        momentum: S where the chunk began, as state.
        keys: before φ, (N, window − 1 + chunk_size, H, d): row window − 2 is the last token before
            the chunk, row window − 1 + t its token t.
        values: (N, window − 1 + chunk_size, H, Dv).
        residuals: R of the rows, as values, dtype as state.
        momentum_write: U after the last token, (N, H, window − 1 + chunk_size), dtype as state.
        decay: the product of all decays since `memory`, (N, H), dtype as state.
        momentum_decay: B, the product of all momenta in the chunk, as decay.
        tail_length: how many of the window − 1 older rows exist, int32 (N,).
        filled: tokens in the chunk, 0 … chunk_size, int32 (N,).
    """

    state: torch.Tensor
    memory: torch.Tensor
    momentum: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    residuals: torch.Tensor
    momentum_write: torch.Tensor
    decay: torch.Tensor
    momentum_decay: torch.Tensor
    tail_length: torch.Tensor
    filled: torch.Tensor

    @property
    def rows(self) -> Rows:
        """The fields that are rows of the chunk, or say which there are."""
        return Rows(self.keys, self.values, self.residuals, self.tail_length, self.filled)

    @classmethod
    def from_state(cls, left: OmegaState, *, chunk_size: int = 64) -> AtlasCache:
        """A cache that goes on where a call of `atlas_memory` ended, with a new chunk.

        That is the same sequence going on if the call's tokens filled its last chunk. The tensors
        of `left` are copied; an initial state that was learned may be expanded.

        Raises:
            TypeError: not an `OmegaState`, wrong dtype, chunk_size not an int.
            ValueError: wrong shape, a state without momentum.
        """
        op = "AtlasCache.from_state"
        check_state(op, left, chunk_size)
        if left.momentum is None:
            raise ValueError(f"{op}: left has no momentum")
        copied = (
            None if x is None else x.clone(memory_format=torch.contiguous_format) for x in left
        )
        return begun(OmegaState._make(copied), chunk_size)

    def to_state(
        self,
        *,
        window: int = 1,
        feature_map: str = "identity",
        coefficients: torch.Tensor | None = None,
    ) -> OmegaState:
        """M and S after the last token, and the tail: what `atlas_memory` leaves there.

        Raises:
            TypeError: wrong dtype, window not an int.
            ValueError: wrong shape, or a window that leaves no room for a chunk.
        """
        op = "AtlasCache.to_state"
        shape = shape_of_rows(op, self.rows, window, feature_map, coefficients, momentum=True)
        check_fields(op, shape, self._asdict(), pool=False)
        from . import extend

        with without_autocast(self.keys.device):
            return extend.left(shape, self, coefficients)


def begun(left: OmegaState, chunk_size: int) -> AtlasCache:
    """A chunk without tokens behind what a call left; its tensors are taken as they are."""
    return _of(omega.begun(left, chunk_size))


def _of(cache: OmegaCache) -> AtlasCache:
    """A chunk without tokens as this rule has it."""
    fields = cache._asdict() | {"memory": cache.state.clone()}
    return AtlasCache(**{name: fields[name] for name in AtlasCache._fields})


def atlas_cache(
    batch: int,
    heads: int,
    width: int,
    values: int,
    *,
    window: int = 1,
    chunk_size: int = 64,
    feature_map: str = "identity",
    coefficients: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> AtlasCache:
    """Memories of zeros to which no token has been written.

    Args:
        batch, heads, width, values, window, chunk_size, feature_map, coefficients, dtype, device:
            as of `omega_cache`.

    Raises:
        TypeError, ValueError: as `omega_cache`.

    Example:
        >>> from fastweights.ops import atlas_cache
        >>> cache = atlas_cache(16, 8, 64, 64, window=4, chunk_size=32, feature_map="symmetric")
        >>> cache.state.shape, cache.keys.shape
        (torch.Size([16, 8, 2144, 64]), torch.Size([16, 35, 8, 64]))
    """
    cache = omega_cache(
        batch, heads, width, values, window=window, chunk_size=chunk_size, momentum=True,
        feature_map=feature_map, coefficients=coefficients, dtype=dtype, device=device,
    )  # fmt: skip
    return _of(cache)


def atlas_extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: AtlasCache,
    *,
    step: torch.Tensor,
    momentum: torch.Tensor,
    output_step: torch.Tensor,
    decay: torch.Tensor | None = None,
    window_gates: torch.Tensor | None = None,
    window: int = 1,
    inner_loss: str = "squared",
    feature_map: str = "identity",
    coefficients: torch.Tensor | None = None,
    chunk_size: int = 64,
    ns_stride: int | None = None,
    ns_steps: int = 5,
    ns_coefficients: str | Sequence[Sequence[float]] = "muon",
    ns_eps: float = 1e-7,
    read_before: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, AtlasCache]:
    """`atlas_memory` cut anywhere: tokens that go on in the middle of a chunk, and may end in one.

    Calls one after another give what one call of `atlas_memory` gives for all of their tokens; a
    call with T = 1 is a step of decoding. Each sequence may be at another place in its chunk;
    nothing is read on the host but on a CPU, where a piece without a Newton–Schulz in any sequence
    leaves it out. The chunk that is open at first and those at the end are plain torch in fp32
    (float64 for float64); whole chunks between them are a call of `atlas_memory`.

    Args:
        q, k: (N, T, H, d), T ≥ 0, one row a sequence of the cache, of the dtype of its keys.
        v: (N, T, H, Dv).
        cache: from `atlas_cache`, `AtlasCache.from_state`, or the call before; not changed. The
            rules (window, chunk_size, losses, features, Newton–Schulz) must be those of its earlier
            tokens.
        step, momentum, output_step, decay, window_gates, window, inner_loss, feature_map,
            coefficients, chunk_size, ns_stride, ns_steps, ns_coefficients, ns_eps, read_before: as
            in `atlas_memory`.
        backend: of the whole chunks.

    Returns:
        y (N, T, H, Dv), contiguous, v's dtype; and the cache behind the last token.

    Differentiable in all floating arguments and the floating tensors of the cache.

    Raises:
        TypeError: wrong dtype, not a plain tensor, not an `AtlasCache`.
        ValueError: wrong shape, a cache for another window or chunk_size; and what `atlas_memory`
            raises.

    Example:
        >>> import torch
        >>> from fastweights.ops import atlas_cache, atlas_extend, atlas_memory
        >>> x, gate = torch.randn(3, 1, 90, 2, 8, dtype=torch.float64), torch.full((1, 90, 2), 0.5)
        >>> gates = dict.fromkeys(("step", "momentum", "output_step"), gate.double())
        >>> rules = {"window": 3, "chunk_size": 16}
        >>> cache = atlas_cache(1, 2, 8, 8, **rules, dtype=torch.float64)
        >>> parts = []
        >>> for begin, end in ((0, 5), (5, 77), (77, 90)):
        ...     piece = {name: g[:, begin:end] for name, g in gates.items()}
        ...     y, cache = atlas_extend(*x[:, :, begin:end], cache, **piece, **rules, ns_stride=4)
        ...     parts.append(y)
        >>> torch.allclose(torch.cat(parts, 1), atlas_memory(*x, **gates, **rules, ns_stride=4)[0])
        True
    """
    op = "atlas_extend"
    backend = requested(op, backend)
    checks.tensor(op, "q", q, "N T H d", checks.FLOATING)
    q, k, v = autocast_operands(q, k, v)
    memory = OmegaTensors(
        q, k, v, step, decay, window_gates, momentum, coefficients, *[None] * 6
    )  # fmt: skip
    given = AtlasTensors(memory, output_step)
    shape = atlas_shape(
        op, given, window=window, chunk_size=chunk_size, inner_loss=inner_loss,
        feature_map=feature_map, read_before=read_before, ns_stride=ns_stride, ns_steps=ns_steps,
        ns_coefficients=ns_coefficients, ns_eps=ns_eps,
    )  # fmt: skip
    if not isinstance(cache, AtlasCache):
        raise TypeError(f"{op}: cache must be an AtlasCache, got {type(cache).__name__}")
    check_fields(op, shape, cache._asdict(), pool=False)
    from . import extend

    with without_autocast(q.device):
        return extend.run(shape, given, cache, backend)
