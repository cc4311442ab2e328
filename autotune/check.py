"""Is a config right? Fresh small inputs, poisoned memory, float64, and the same bits each time.

A sweep asks this of every config before it times any. For a problem the tuning file gives small
ragged ones that the same config serves; each is drawn from two seeds, and the literal definition is
run on it in float64 (truth) and in the call's dtype (yardstick), once for all configs. A config
passes if every result, and in a backward every gradient, is close enough by the rule of `verify`,
and if `REPEATS` more runs of it give the same bits. Configs that sum with atomics are judged by
their error in each of those runs instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from .space import Config
from .verify import Comparison

Tensors = dict[str, torch.Tensor]
REPEATS = 10


def named(results: Any, name: str = "out") -> Tensors:
    """Flatten results (tensor, tuple, named tuple, nested) to names and tensors, without None."""
    if results is None:
        return {}
    if isinstance(results, torch.Tensor):
        return {name: results}
    names = getattr(results, "_fields", [f"{name}{i}" for i in range(len(results))])
    flat: Tensors = {}
    for part, value in zip(names, results, strict=True):
        flat |= named(value, part)
    return flat


def mapped(function: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    """An argument with all of its tensors changed: one tensor, a (named) tuple of them, nested."""
    if isinstance(x, torch.Tensor):
        return function(x)
    if not isinstance(x, tuple):
        return x
    parts = [mapped(function, part) for part in x]
    return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)


def is_floating(x: Any) -> bool:
    """Whether x is a tensor that can take a gradient."""
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def run(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    upstream: Callable[[Tensors], Tensors] | None,
) -> tuple[Tensors, Tensors]:
    """Results of a call and, if `upstream` is given, the gradient of every floating argument.

    `upstream` makes the gradients of the differentiable results from all results. An argument
    that a result does not depend on has gradient zero.
    """
    if upstream is None:
        with torch.no_grad():
            return named(function(**arguments)), {}
    leaves = {name: x.detach().requires_grad_() for name, x in arguments.items() if is_floating(x)}
    results = named(function(**(arguments | leaves)))
    gradients = upstream(results)
    for name in gradients:
        if name not in results or not results[name].requires_grad:
            raise AssertionError(f"no differentiable result {name} among {list(results)}")
    outputs = [results[name] for name in gradients]
    found = torch.autograd.grad(
        outputs, list(leaves.values()), list(gradients.values()), allow_unused=True
    )
    by_name = {
        f"d {name}": torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }
    return {name: x.detach() for name, x in results.items()}, by_name


def bit_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same shape, dtype and bits (a NaN equals itself, 0 differs from −0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(word), b.contiguous().view(word))


def first_difference(got: Tensors, expected: Tensors) -> str | None:
    """None if all bits are equal, else the first result that differs and in how many elements."""
    for name, x in got.items():
        y = expected[name]
        if not bit_equal(x, y):
            differ = (x != y) & ~(x.isnan() & y.isnan())
            return f"{name} in {int(differ.sum())} of {prod(x.shape)} elements"
    return None


@dataclass(frozen=True)
class Call:
    """One call of a problem, which can be run again on the same arguments.

    Attributes:
        arguments: by name.
        written: names of the arguments that the function writes; each run gets fresh copies.
        backward: whether gradients are asked for.
        seed: of the upstream gradients.
        compared: of all results, those that are compared.
    """

    arguments: dict[str, Any]
    written: tuple[str, ...] = ()
    backward: bool = False
    seed: int = 0
    compared: Callable[[Tensors], Tensors] = dict

    def run(
        self,
        function: Callable[..., Any],
        upstream: Tensors | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensors:
        """All results: those returned, those written in place, the gradients.

        `upstream` are the gradients to send back, drawn from the seed and put there if it is
        empty. With `dtype` floating arguments are cast to it.
        """

        def cast(x: torch.Tensor) -> torch.Tensor:
            return x.to(dtype) if dtype is not None and x.is_floating_point() else x

        arguments = {name: mapped(cast, x) for name, x in self.arguments.items()}
        arguments |= {name: mapped(torch.clone, arguments[name]) for name in self.written}

        def send(results: Tensors) -> Tensors:
            assert upstream is not None
            if not upstream:
                upstream.update(self._drawn(results))
            return {name: x.to(results[name].dtype) for name, x in upstream.items()}

        results, gradients = run(function, arguments, send if self.backward else None)
        for name in self.written:
            results |= named(arguments[name], name)
        return self.compared(results | gradients)

    def _drawn(self, results: Tensors) -> Tensors:
        drawn = {}
        for i, (name, x) in enumerate(results.items()):
            if x.requires_grad:
                generator = torch.Generator(x.device).manual_seed(1000 * self.seed + i + 17)
                noise = torch.randn(x.shape, generator=generator, device=x.device)
                # A result of −inf has no gradient to pass on.
                drawn[name] = noise.masked_fill(x.detach().isinf(), 0.0).to(x.dtype)
        return drawn


@dataclass(frozen=True)
class _Truth:
    call: Call
    upstream: Tensors
    exact: Tensors
    plain: Tensors


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
        reason: None, or what is wrong, to be read after "it".
        error: the worst error as a share of what is allowed.
    """

    reason: str | None
    error: float


class Check:
    """The small problems of one problem and pass with their truths, asked about many configs.

    Args:
        problems: of the tuning file: each with `inputs`, `call`, `functions` and, if plain torch is
            not the reference itself, `yardstick`; if some results mean nothing, `compared`.
        seeds: of the inputs; each problem is drawn from each.
    """

    def __init__(
        self,
        problems: Sequence[Any],
        *,
        backward: bool,
        dtype: torch.dtype,
        device: torch.device,
        seeds: Sequence[int],
    ) -> None:
        self.dtype = dtype
        self.truths = []
        for problem in problems:
            reference = problem.functions[1]
            yardstick = getattr(problem, "yardstick", None) or reference
            for seed in seeds:
                arguments = problem.inputs(dtype, device, seed) | problem.call
                written = getattr(problem, "written", ())
                compared = getattr(problem, "compared", dict)
                call = Call(arguments, written, backward, seed, compared)
                upstream: Tensors = {}
                plain = call.run(yardstick, upstream)
                exact = call.run(reference, upstream, torch.float64)
                self.truths.append(_Truth(call, upstream, exact, plain))

    def ask(self, function: Callable[..., Any], config: Config) -> Verdict:
        """Run the function, which uses the config, and judge it."""
        from ..ops import alloc

        comparison = Comparison(self.dtype)
        last: Tensors = {}
        with alloc.poison():
            for truth in self.truths:
                last = truth.call.run(function, truth.upstream)
                _add(comparison, last, truth)
            error, reason = _judged(comparison)
            if reason is not None:
                return Verdict(reason, error)
            for i in range(REPEATS):
                again = truth.call.run(function, truth.upstream)
                if config.atomic:
                    comparison = Comparison(self.dtype)
                    _add(comparison, again, truth)
                    worse, reason = _judged(comparison)
                    error = max(error, worse)
                else:
                    reason = first_difference(again, last)
                    reason = reason and f"is unrepeatable: run {i + 2} differs, {reason}"
                if reason is not None:
                    return Verdict(reason, error)
        return Verdict(None, error)


def _add(comparison: Comparison, got: Tensors, truth: _Truth) -> None:
    scale = None
    if truth.upstream:
        scale = torch.cat([x.double().reshape(-1) for x in truth.upstream.values()])
    for name, x in truth.exact.items():
        gradient = scale if name.startswith("d ") else None
        comparison.add(name, got[name], x, truth.plain[name], gradient)


def _judged(comparison: Comparison) -> tuple[float, str | None]:
    """The worst share of an allowed error, and why it is too large if it is."""
    shares = [
        found.error / found.limit
        for name in comparison.rows
        for found in comparison.judge(name).values()
    ]
    report = comparison.report()
    reason = f"is wrong against float64: {'; '.join(report[:3])}" if report else None
    return max(shares), reason
