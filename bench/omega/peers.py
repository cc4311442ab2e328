"""The Omega rule in plain torch, and the gated delta rule of flash-linear-attention.

`chunked` is what one would hand to torch.compile. A chunk with keys K and values V, those of the
window before it among them, changes the memory M and its momentum S before it by an affine map,

    M ← (A_b I − Kᵀ diag(P_b) K) M + a_b S + Kᵀ diag(P_b) V
    S ← −Kᵀ diag(U_b) K M + B_b S + Kᵀ diag(U_b) V

so that one small product a chunk is all that has to wait for the chunk before; the maps are formed
for all chunks at once, and so is what the queries Q read:

    Y = A ∘ Q M + a ∘ Q S − (P ∘ Q Kᵀ) (K M − V)

The maps are applied in fp32, where A_b I less a small matrix keeps its digits. The other products
run in the dtype of k, everything between them in fp32 (float64 for float64).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..cases import MODES
from ..family import Contender, Work
from .cases import MatmulCase, OmegaCase
from .ours import Inputs, call, operands, rules

NAMES = {
    "eager": "the op's eager backend: chunk after chunk in torch",
    "compiled": "all chunks in torch as one graph, under torch.compile",
    "fla": "chunk_gated_delta_rule of flash-linear-attention: no window",
    "matmul": "one large torch.matmul: the rate of tensor cores",
}
# flash-linear-attention #640: its gated backward refuses to run on Hopper with these Tritons.
_BROKEN = ((3, 4, 0), (3, 7, 1))  # from, and lifted by


def chunked(
    q: Tensor, k: Tensor, v: Tensor, step: Tensor, decay: Tensor, window_gates: Tensor,
    momentum: Tensor | None = None, *, window: int, chunk_size: int,
) -> Tensor:  # fmt: skip
    """y of `omega_memory`, (B, T, H, D); window − 1 is at most chunk_size, no gate is 0."""
    tokens, dtype, acc = q.shape[1], k.dtype, step.dtype
    older, missing = window - 1, -q.shape[1] % chunk_size

    def blocks(x: Tensor) -> Tensor:
        """(B, T, H, ·) → (B, H, chunks, b, ·), zeros behind the last token."""
        x = pad(x, (0, 0, 0, 0, 0, missing))
        return x.transpose(1, 2).unflatten(2, (-1, chunk_size))

    def with_older(x: Tensor) -> Tensor:
        """Blocks of n = window − 1 + b rows."""
        x = blocks(x)
        before = pad(x[:, :, :-1, chunk_size - older :], (0, 0, 0, 0, 1, 0))
        return torch.cat((before, x), 3)

    def product(left: Tensor, right: Tensor) -> Tensor:
        return (left.to(dtype) @ right.to(dtype)).to(acc)

    def products(x: Tensor) -> tuple[Tensor, Tensor]:
        """Of a gate (B, T, H): from each token to each later one, and from the chunk's begin."""
        total = blocks(x.log()[..., None])[..., 0].cumsum(-1)
        later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).tril()
        gap = (total[..., :, None] - total[..., None, :]).masked_fill(~later, -torch.inf)
        return gap.exp(), total.exp()

    q, k, v = blocks(q), with_older(k), with_older(v).to(acc)
    weights = blocks(step[..., None] * window_gates)
    t = torch.arange(chunk_size, device=q.device)[:, None]
    places = t + older - torch.arange(window, device=q.device)
    band = weights.new_zeros(*weights.shape[:-1], chunk_size + older)
    push = band.scatter(-1, places.expand_as(weights), weights)  # W, and U with momentum
    decays, rate = products(decay)
    drop = carry = None
    if momentum is not None:
        momenta, drop = products(momentum)
        push = momenta @ push
        carry = (decays @ drop[..., None])[..., 0]
    write = decays @ push  # P
    scores = write * product(q, k.mT)

    def weighed(rows: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """kept · I − Kᵀ diag(rows) K and Kᵀ diag(rows) V of each chunk."""
        keys = (rows[..., None] * k).mT
        return kept[..., None, None] * eye - product(keys, k), product(keys, v)

    eye = torch.eye(k.shape[-1], dtype=acc, device=k.device)
    maps, offsets = weighed(write[..., -1, :], rate[..., -1])
    if carry is not None and drop is not None:
        across, pushed = weighed(push[..., -1, :], torch.zeros_like(rate[..., -1]))
        of_s = torch.cat([x[..., -1, None, None] * eye for x in (carry, drop)], -2)
        maps = torch.cat((torch.cat((maps, across), -2), of_s), -1)
        offsets = torch.cat((offsets, pushed), -2)

    states = [torch.zeros_like(offsets[:, :, 0].flatten(0, 1))]
    steps = zip(maps.flatten(0, 1).unbind(1), offsets.flatten(0, 1).unbind(1), strict=True)
    for matrix, offset in list(steps)[:-1]:
        states.append(torch.baddbmm(offset, matrix, states[-1]))
    before = torch.stack(states, 1).unflatten(0, q.shape[:2])
    memory = before[..., : k.shape[-1], :]
    y = rate[..., None] * product(q, memory) - product(scores, product(k, memory) - v)
    if carry is not None:
        y = y + carry[..., None] * product(q, before[..., k.shape[-1] :, :])
    return y.flatten(2, 3)[:, :, :tokens].transpose(1, 2).to(dtype)


def available(name: str, case: OmegaCase) -> str | None:
    """Why the peer cannot run the case; None if it is worth trying."""
    if name != "fla":
        return None
    if case.device != "cuda":
        return "needs a GPU"
    if importlib.util.find_spec("fla") is None:
        return "fla is not installed"
    return "16-bit dtypes only" if case.dtype not in ("bf16", "fp16") else None


def contenders(case: OmegaCase, names: tuple[str, ...]) -> list[Contender]:
    """The peers of a case among `names`."""
    return [_contender(name, case) for name in case.peers if name in names]


def _contender(name: str, case: OmegaCase) -> Contender:
    if name == "matmul":
        counted = MatmulCase(**vars(case))
        return Contender(name, counted, name, _matmul, modes=("fwd",), checked=False)
    forward_alone = case.symmetric or (name == "fla" and _backward_refuses())
    return Contender(
        name=name,
        case=case,
        function="gated delta" if name == "fla" else "omega",
        build=_BUILD[name],
        reason=available(name, case),
        modes=("fwd",) if forward_alone else MODES,
    )


def _matmul(case: MatmulCase, inputs: Inputs) -> Work:
    size = (case.side, case.side)
    a, b = (torch.randn(size, device=inputs.d_out.device).to(case.torch_dtype) for _ in range(2))
    out = torch.empty_like(a)

    def forward() -> tuple[Tensor, ...]:
        return (torch.matmul(a, b, out=out),)

    return Work(forward, {}, (inputs.d_out,))


def _eager(case: OmegaCase, inputs: Inputs) -> Work:
    return call(case, inputs, "eager")


def _compiled(case: OmegaCase, inputs: Inputs) -> Work:
    from torch._functorch import config

    # Each case is a new static shape; without a reset dynamo would give up and run it uncompiled.
    torch._dynamo.reset()
    compiled: Any = torch.compile(chunked, dynamic=False, fullgraph=True)

    def forward() -> tuple[Tensor, ...]:
        return (compiled(**operands(case, inputs.leaves), **rules(case)),)

    work = Work(forward, inputs.leaves, (inputs.d_out,))
    # Compiled here: a backward that donates its saved tensors cannot be differentiated twice.
    with config.patch(donated_buffer=False):
        outputs = work.forward()
        if case.modes != ("fwd",):
            work.backward(outputs)
    return work


def _fla(case: OmegaCase, inputs: Inputs) -> Work:
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    leaves = {name: inputs.leaves[name] for name in ("q", "k", "v", "step")}
    # Its gate is the logarithm, made outside of the call that is timed.
    leaves["log_decay"] = inputs.leaves["decay"].detach().log().requires_grad_()

    def forward() -> tuple[Tensor, ...]:
        out, _ = rule(
            leaves["q"], leaves["k"], leaves["v"], leaves["log_decay"], leaves["step"], scale=1.0,
            use_qk_l2norm_in_kernel=case.l2norm,
        )  # fmt: skip
        return (out,)

    return Work(forward, leaves, (inputs.d_out,))


_BUILD: dict[str, Callable[[OmegaCase, Inputs], Work]] = {
    "eager": _eager,
    "compiled": _compiled,
    "fla": _fla,
}


def _backward_refuses() -> bool:
    """Whether fla's gated backward is known to raise on this GPU and Triton."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    version = str(importlib.import_module("triton").__version__).split("+")[0]
    here = tuple(int(part) for part in version.split(".")[:3])
    return _BROKEN[0] <= here < _BROKEN[1]
