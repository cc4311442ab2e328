"""The op machinery: which implementation runs, and how torch sees it. Every op goes through here.

An op family is a folder `ops/<name>/`. Its `op.py` describes each torch operator once, as an
`Operator`, and hands it to `declare`, which makes the library entry, the fake kernel, autograd and
the FLOP formula. A backend is the module `eager`, `triton` or `cuda` of that folder; it exports

    supports(shape, arch) -> str | None      None, or why it cannot run this call
    fwd(shape, ...), bwd(shape, ...)         the launchers
    SPACE_FWD, SPACE_BWD                     its config spaces (None for eager)
    spaces(shape) -> {pass: space}           if which spaces a call has depends on its shape

The public function replaces "auto" by the innermost `use_backend()` and passes the word on as the
operator's last argument; what is still "auto" then is resolved inside the operator, on real
tensors, so a compiled graph does not depend on it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from ..autotune import tables
from ..autotune.space import Config, Device, Space, chosen, measured_ms
from . import checks

BACKENDS = ("auto", "eager", "triton", "cuda")
ORDER = ("cuda", "triton", "eager")
WIN = 1.02  # by how much a backend has to be faster to be taken before an earlier one

LIBRARY = torch.library.Library("fastweights", "DEF")


# ---- choosing a backend -------------------------------------------------------------------------

# A plain list, not a ContextVar: Dynamo cannot trace one, and backward runs in another thread,
# which reads the word that forward saved instead.
_backend_stack: list[str] = ["auto"]


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Make `backend` the meaning of `backend="auto"` inside the block."""
    checks.choice("use_backend", "backend", backend, BACKENDS)
    _backend_stack.append(backend)
    try:
        yield
    finally:
        _backend_stack.pop()


def requested(op: str, backend: str) -> str:
    """The word to pass to the operator: the argument, or what `use_backend` says for "auto"."""
    checks.choice(op, "backend", backend, BACKENDS)
    return _backend_stack[-1] if backend == "auto" else backend


@functools.cache
def implementation(package: str, backend: str) -> ModuleType | None:
    """The backend module of an op package, or None if the package has none of that name."""
    name = f"{package}.{backend}"
    if importlib.util.find_spec(name) is None:
        return None
    return importlib.import_module(name)


def refusal(package: str, backend: str, shape: Any, arch: str) -> str | None:
    """Why `backend` cannot run this call; None if it can."""
    if backend != "eager":
        if shape.dtype == torch.float64:
            return "float64 runs on eager only"
        if arch == "cpu" and not (
            backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        ):
            return "the tensors are on the CPU"
    module = implementation(package, backend)
    if module is None:
        return "this op has no such implementation"
    return module.supports(shape, arch)


def yields(package: str, name: str, shape: Any, arch: str) -> str | None:
    """None, or why "auto" goes past a backend that can run the call."""
    rule = getattr(implementation(package, name), "yields", None)
    reason: str | None = rule(shape, arch) if rule is not None else None
    return reason


def resolve(package: str, shape: Any, backend: str) -> ModuleType:
    """The module that runs this call.

    Raises:
        ValueError: an explicit backend that does not support the call, or "auto" when none does.
    """
    arch = Device.of(shape.device).arch
    op = package.rpartition(".")[2]
    if backend != "auto":
        reason = refusal(package, backend, shape, arch)
        if reason is not None:
            raise ValueError(f"{op}: backend={backend!r} cannot run this call: {reason}")
        module = implementation(package, backend)
        assert module is not None
        return module
    reasons = []
    for name in _auto_order(arch):
        reason = refusal(package, name, shape, arch) or yields(package, name, shape, arch)
        if reason is None:
            module = implementation(package, _faster(package, name, shape) or name)
            assert module is not None
            return module
        reasons.append(f"{name}: {reason}")
    raise ValueError(f"{op}: no backend supports this call ({'; '.join(reasons)})")


def _faster(package: str, first: str, shape: Any) -> str | None:
    """A backend that a sweep found faster than the first that supports a call; None if none.

    Only rows count that were timed on one and the same problem.
    """
    device = Device.of(shape.device)
    pass_ = "bwd" if getattr(shape, "backward", False) else "fwd"
    own = _spaces(package, first, shape).get(pass_)
    if own is None or not tables.contested(own.op, device):
        return None
    found: dict[str, tuple[str, float]] = {}
    for name in ORDER[ORDER.index(first) :]:
        space = _spaces(package, name, shape).get(pass_)
        timed = None if space is None else measured_ms(space, space.bucket(shape), device)
        if timed and (name == first or refusal(package, name, shape, device.arch) is None):
            found[name] = timed
    if first not in found:
        return None
    problem, limit = found.pop(first)
    rivals = {name: ms for name, (timed, ms) in found.items() if timed == problem}
    best = min(rivals, key=lambda name: rivals[name], default=None)
    return best if best is not None and WIN * rivals[best] < limit else None


def _auto_order(arch: str) -> tuple[str, ...]:
    return ("eager",) if arch == "cpu" else ORDER


# ---- saying what would run ----------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """What a call would run, and why. Printing it gives one line a fact.

    Attributes:
        op: the public function's name.
        backend: the implementation that would run; None if none can.
        why: why that one.
        configs: chosen config of each pass ("fwd", "bwd"), where the backend has config spaces.
        refused: the other backends and what keeps each from running.
        origins: where each config comes from: a table, the closed-form default, …
    """

    op: str
    backend: str | None
    why: str
    configs: dict[str, Config] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.backend or 'nothing can run this call'} ({self.why})"]
        lines += [
            f"  {pass_}: {config.name} ({self.origins[pass_]})"
            for pass_, config in self.configs.items()
        ]
        lines += [f"  not {backend}: {reason}" for backend, reason in self.refused.items()]
        return "\n".join(lines)


_explained: dict[Callable[..., Any], tuple[str, Callable[..., Any]]] = {}


def explainable(package: str, plan: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a public function: `plan` takes the same arguments and returns their shape.

    It also takes `concrete`: True lets it look at what only real tensors have, their addresses.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _explained[function] = (package, plan)
        return function

    return register


def public() -> list[Callable[..., Any]]:
    """The public functions that `explain` takes."""
    return list(_explained)


def planned(op: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, Any]:
    """The package of a public function, and the shape of a call of it.

    Raises:
        TypeError: `op` is not a public function of this package.
    """
    if op not in _explained:
        raise TypeError(f"explain: op must be a public fastweights function, got {op!r}")
    package, plan = _explained[op]
    return package, plan(*args, **kwargs, concrete=True)


def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Which implementation and configs a call of a public function would run, and why.

    Takes the function and the call's own arguments (fake tensors too); launches nothing.

    Raises:
        TypeError: `op` is not a public function of this package.
    """
    package, shape = planned(op, *args, **kwargs)
    asked = kwargs.get("backend", "auto")
    backend = requested(op.__name__, asked)
    device = Device.of(shape.device)
    refused: dict[str, str] = {}
    for name in (backend,) if backend != "auto" else ORDER:
        reason = refusal(package, name, shape, device.arch)
        if reason is None and backend == "auto" and name not in _auto_order(device.arch):
            reason = "auto runs eager on CPU tensors"
        if reason is None and backend == "auto":
            reason = yields(package, name, shape, device.arch)
        if reason is not None:
            refused[name] = reason
            continue
        faster = _faster(package, name, shape) if backend == "auto" else None
        if backend != "auto":
            why = "asked for"
        elif faster is not None:
            why, name = f"measured faster than {name}", faster
        else:
            why = "first of cuda, triton, eager that supports the call"
        configs, origins = {}, {}
        for pass_, space in spaces(package, name, shape, device).items():
            choice = chosen(space, space.bucket(shape), device)
            configs[pass_], origins[pass_] = choice.config, tables.reason(space, choice)
        return Explanation(op.__name__, name, why, configs, refused, origins)
    return Explanation(op.__name__, None, "see below", {}, refused)


def spaces(package: str, backend: str, shape: Any, device: Device) -> dict[str, Space]:
    """The config spaces of a call on a backend, by pass; those alone that have a config for it."""
    return {
        pass_: space
        for pass_, space in _spaces(package, backend, shape).items()
        # A pass that no config serves runs on another backend.
        if space.fitting(space.bucket(shape), device)
    }


def _spaces(package: str, backend: str, shape: Any) -> dict[str, Space]:
    module: Any = implementation(package, backend)
    if hasattr(module, "spaces"):
        found = module.spaces(shape)
    else:
        found = {pass_: getattr(module, f"SPACE_{pass_.upper()}", None) for pass_ in ("fwd", "bwd")}
    return {pass_: space for pass_, space in found.items() if space is not None}


# ---- autocast -----------------------------------------------------------------------------------


def autocast_operands(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Under autocast, cast the matmul operands of an op to autocast's dtype; else return them.

    Only what is passed here is cast: states, gates and per-head parameters keep their precision.
    float64 is left alone. Integer and boolean tensors do not belong here.
    """
    kind = operands[0].device.type
    if not torch.is_autocast_enabled(kind):
        return operands
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in operands)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context in which a public function calls its operator."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


# ---- declaring operators ------------------------------------------------------------------------


@dataclass(frozen=True)
class Operator:
    """One torch operator of a family.

    Attributes:
        name: name inside the namespace ("polar_attention_fwd").
        schema: arguments and results, "(Tensor q, ..., str backend) -> (Tensor, Tensor)".
        impl: runs it on real tensors; picks the backend with `resolve`.
        fake: returns outputs of the right shape, strides, dtype and device.
        flops: useful floating-point operations of one call, given the operator's arguments.
    """

    name: str
    schema: str
    impl: Callable[..., Any]
    fake: Callable[..., Any]
    flops: Callable[..., int] | None = None


def declare(
    operator: Operator,
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Any:
    """Register one operator and return its overload (`torch.ops.fastweights.<name>.default`).

    With `setup_context` and `backward` the operator is differentiable. Without them it gets a
    backward that raises: a library operator with no autograd formula would otherwise drop out of
    the graph and make a second derivative silently wrong.
    """
    name = operator.name
    LIBRARY.define(name + operator.schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, _outside_autocast(operator.impl, torch.device(key.lower())), key)
    qualified = f"fastweights::{name}"
    torch.library.register_fake(qualified, operator.fake, lib=LIBRARY)
    if backward is None:
        backward = _refuse_backward(name)
    overload = getattr(torch.ops.fastweights, name).default
    LIBRARY.impl(name, _autograd(overload, setup_context, backward), "Autograd", with_keyset=True)
    if operator.flops is not None:
        register_flop_formula(overload.overloadpacket, get_raw=True)(operator.flops)
    return overload


def recomputed(
    backward: Any, tensors: int, differentiable: Sequence[int]
) -> dict[str, Callable[..., Any]]:
    """What `declare` takes for an operator whose arguments are all that it saves.

    Args:
        backward: the operator of the gradients; takes those of the results, then the arguments.
        tensors: how many of the arguments, the first ones, are tensors or None.
        differentiable: places of those that have a gradient, in the order of its results.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:tensors])
        ctx.rules = inputs[tensors:]

    def gradients(ctx: Any, *upstream: torch.Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        grads: list[Any] = [None] * (tensors + len(ctx.rules))
        found = backward(*upstream, *saved, *ctx.rules)
        for place, gradient in zip(differentiable, found, strict=True):
            if saved[place] is not None:
                grads[place] = gradient
        return tuple(grads)

    return {"setup_context": setup_context, "backward": gradients}


def _autograd(
    overload: Any, setup_context: Callable[..., None] | None, backward: Callable[..., Any]
) -> Callable[..., Any]:
    """What the operator does above its kernels: one autograd node, if anything requires grad.

    `torch.library.register_autograd` does the same, but looks up the schema once for each argument
    of each call: 90 of 170 µs of a call with 20 arguments on one CPU core. Our schemas have neither
    defaults nor keyword-only arguments, so that there is nothing to look up.
    """

    def below(keyset: Any, args: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        result = below(keyset, args)
        if setup_context is not None:
            setup_context(ctx, args, result)
        return result

    def backward_of_node(ctx: Any, *grads: Any) -> Any:
        return None, *backward(ctx, *grads)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward_of_node)}
    node: Any = type(f"{overload._opname}_node", (torch.autograd.Function,), members)

    def run(keyset: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return node.apply(keyset, *args)
        return below(keyset, args)

    return run


def _outside_autocast(impl: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`impl` with autocast off: backward() called under autocast would cast its products too."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with without_autocast(device):
            return impl(*args, **kwargs)

    return run


def _refuse_backward(name: str) -> Callable[..., Any]:
    reference = name.removesuffix("_bwd").removesuffix("_fwd")

    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"fastweights::{name} has no double backward; "
            f"differentiate fastweights.reference.{reference} twice instead"
        )

    return backward
