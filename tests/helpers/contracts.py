"""Checks of the contracts that every op keeps, whatever it computes.

A check takes `run`, a function of no argument or of the op's tensors, and raises AssertionError
with the first difference. None of them knows an op.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fastweights.autotune import Config, Device, Space, use_config

from . import oracle
from .oracle import Tensors, assert_bit_equal, named


def check_opcheck(operator: Any, samples: Sequence[tuple[Any, ...]]) -> None:
    """`torch.library.opcheck`, all its tests, on each tuple of operator arguments."""
    assert samples, f"{operator}: no samples"
    for i, arguments in enumerate(samples):
        try:
            torch.library.opcheck(operator, arguments)
        except Exception as failure:
            raise AssertionError(f"opcheck of {operator}, sample {i}: {failure}") from failure


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """`torch.use_deterministic_algorithms(True)` inside the block."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def leaves(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with fresh leaves (same strides) for all floating tensors."""
    return {
        name: x.detach().requires_grad_() if oracle.is_floating(x) else x
        for name, x in arguments.items()
    }


def forward_backward(
    function: Callable[..., Any], arguments: dict[str, Any], seed: int = 0
) -> Tensors:
    """All results and the gradients of all floating arguments for seeded upstream gradients."""
    results, gradients = oracle.run(
        function, arguments, lambda results: random_upstream(results, seed)
    )
    return results | gradients


def random_upstream(results: Tensors, seed: int = 0) -> Tensors:
    """One random upstream gradient for each differentiable result."""
    drawn = {}
    for name, x in results.items():
        if x.requires_grad:
            source = torch.Generator(x.device).manual_seed(seed)
            drawn[name] = torch.randn(x.shape, generator=source, device=x.device).to(x.dtype)
            drawn[name].masked_fill_(x.detach().isinf(), 0.0)
    return drawn


def check_fullgraph(
    function: Callable[..., Any], arguments: dict[str, Any], *, compiler: str | None = None
) -> None:
    """Compiled as one graph, results and gradients equal eager bit for bit.

    `compiler` is by default inductor on a GPU and aot_eager on a CPU, where inductor would spend
    half a minute on C++. Deterministic mode is on, so that bits can be compared at all.
    """
    device = next(x.device for x in arguments.values() if isinstance(x, torch.Tensor))
    compiler = compiler or ("inductor" if device.type == "cuda" else "aot_eager")
    torch._dynamo.reset()
    with deterministic():
        expected = forward_backward(function, arguments)
        compiled = torch.compile(function, fullgraph=True, backend=compiler)
        got = forward_backward(compiled, arguments)
        breaks = torch._dynamo.explain(function)(**leaves(arguments)).graph_break_count
    torch._dynamo.reset()
    assert breaks == 0, f"{breaks} graph breaks"
    assert_bit_equal(got, expected, f"compiled by {compiler}")


def check_repeatable(run: Callable[[], Any], times: int) -> None:
    """`times` runs give the same bits."""
    first = {name: x.clone() for name, x in named(run()).items()}
    assert first, "nothing to compare"
    for i in range(1, times):
        assert_bit_equal(named(run()), first, f"run {i} against run 0")


def check_backward_twice(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Backward through one graph twice gives equal gradients: nothing saved is overwritten.

    Both runs must be bit-equal, so a config with atomics needs deterministic mode around.
    """
    inputs = leaves(arguments)
    tensors = [x for x in inputs.values() if oracle.is_floating(x)]
    results = named(function(**inputs))
    upstream = random_upstream(results)
    outputs = [results[name] for name in upstream]
    once, twice = (
        torch.autograd.grad(
            outputs, tensors, list(upstream.values()), retain_graph=True, allow_unused=True
        )
        for _ in range(2)
    )
    assert_bit_equal(named(twice), named(once), "second backward")


def check_grad_out_untouched(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Forward and backward leave the arguments and the upstream gradients as they were."""
    inputs = leaves(arguments)
    tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    before = {name: x.detach().clone() for name, x in tensors.items()}
    results = named(function(**inputs))
    upstream = random_upstream(results)
    upstream_before = {name: x.clone() for name, x in upstream.items()}
    floating = [x for x in tensors.values() if oracle.is_floating(x)]
    torch.autograd.grad(
        [results[name] for name in upstream], floating, list(upstream.values()), allow_unused=True
    )
    assert_bit_equal(upstream, upstream_before, "upstream gradient after backward")
    after = {name: x.detach() for name, x in tensors.items()}
    assert_bit_equal(after, before, "argument after backward")


def check_expanded_grad_out(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Upstream gradients of stride 0 (what `.sum().backward()` sends) equal contiguous ones."""

    def expanded(results: Tensors) -> Tensors:
        one = {n: x for n, x in results.items() if x.requires_grad}
        return {n: x.new_full((), 0.5).expand(x.shape) for n, x in one.items()}

    def contiguous(results: Tensors) -> Tensors:
        return {n: x.contiguous() for n, x in expanded(results).items()}

    got = oracle.run(function, arguments, expanded)[1]
    assert_bit_equal(got, oracle.run(function, arguments, contiguous)[1], "expanded grad_out")


def check_views(
    function: Callable[..., Any], arguments: dict[str, Any], views: dict[str, Any]
) -> None:
    """Arguments laid out otherwise give the same bits, also in the gradients.

    `views` replaces some of `arguments` by equal tensors of other strides.
    """
    for name, x in views.items():
        assert torch.equal(x, arguments[name]), f"{name}: the view is another tensor"
    expected = forward_backward(function, arguments)
    got = forward_backward(function, arguments | views)
    assert_bit_equal(got, expected, f"views of {', '.join(views)}")


def every_config(space: Space, shape: Any) -> Iterator[Config]:
    """Each config that fits a call of this shape, forced while the loop body runs it.

    Raises:
        AssertionError: none fits.
    """
    key = space.bucket(shape)
    configs = space.fitting(key, Device.of(shape.device))
    assert configs, f"no config of {space.op}/{space.pass_} fits {key}"
    for config in configs:
        with use_config(space, config):
            yield config


def check_packed(
    run: Callable[..., Any],
    arguments: dict[str, Any],
    tokens: Sequence[str],
    lengths: Sequence[int],
    compare: Callable[[str, torch.Tensor, torch.Tensor], None],
) -> None:
    """Sequences packed along dimension 1 give what each gives alone, gradients included.

    Args:
        run: the op; called with `cu_seqlens` for the packed run and without for each sequence.
        arguments: packed arguments without `cu_seqlens`; results keep tokens in dimension 1.
        tokens: names of the arguments that hold tokens in dimension 1, all of one length.
        lengths: of the sequences; tokens left over are padding, whose results must be 0.
        compare: called with name, packed and separate for each result and gradient; the
            gradients of other arguments are summed over the sequences.
    """
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    device = arguments[tokens[0]].device
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
    chosen: Tensors = {}

    def upstream(results: Tensors) -> Tensors:
        chosen.update(random_upstream(results))
        return chosen

    packed, packed_grads = oracle.run(run, arguments | {"cu_seqlens": cu_seqlens}, upstream)
    shared = {n: torch.zeros_like(x) for n, x in packed_grads.items() if n[2:] not in tokens}
    for i, (start, stop) in enumerate(itertools.pairwise(starts)):
        span = slice(start, stop)
        alone = arguments | {name: arguments[name][:, span] for name in tokens}

        def part(results: Tensors, span: slice = span) -> Tensors:
            return {name: x[:, span] for name, x in chosen.items()}

        results, grads = oracle.run(run, alone, part)
        for name, x in results.items():
            compare(f"sequence {i}: {name}", packed[name][:, span], x)
        for name, x in grads.items():
            if name in shared:
                shared[name] += x
            else:
                compare(f"sequence {i}: {name}", packed_grads[name][:, span], x)
    for name, x in shared.items():
        compare(name, packed_grads[name], x)
    rest = slice(starts[-1], None)
    for name, x in packed.items():
        assert not x[:, rest][~x[:, rest].isinf()].any(), f"padding of {name} is not 0"
    for name in tokens:
        assert not packed_grads[f"d {name}"][:, rest].any(), f"padding of d {name} is not 0"


def captured(
    step: Callable[[], tuple[torch.Tensor, ...]], device: torch.device
) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]:
    """A CUDA graph of a step, warmed up on a stream of its own, and what each replay writes."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return graph, outputs


def run_uninterpreted(code: str) -> list[str]:
    """Lines that a program prints in a process without the interpreter; it may import helpers."""
    tests = Path(__file__).resolve().parents[1]
    paths = f"import sys\nsys.path[:0] = [{str(tests)!r}, {str(tests.parent)!r}]\n"
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home())}  # and no TRITON_INTERPRET
    ran = subprocess.run(
        [sys.executable, "-c", paths + textwrap.dedent(code)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout, ran.stderr
    return ran.stdout.splitlines()
