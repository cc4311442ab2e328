"""What the README and the public docstrings show runs as it stands there."""

import doctest
import functools
import re
from pathlib import Path

import pytest
import torch

from fastweights import graphs, ops
from fastweights.ops import dispatch

README = Path(__file__).resolve().parent.parent / "README.md"
TEXT = README.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
PUBLIC = [getattr(package, name) for package in (ops, graphs) for name in package.__all__]
EXAMPLES = [test for x in PUBLIC for test in doctest.DocTestFinder().find(x) if test.examples]


@pytest.fixture
def _quick_compile(monkeypatch):
    """`torch.compile` traces and differentiates as always, but generates no code."""
    quick = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", quick)


@pytest.mark.usefixtures("_quick_compile")
@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.strip().splitlines()[1])
def test_python_block_runs(code, capsys):
    exec(compile(code, str(README), "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    expected = "triton" if torch.cuda.is_available() and "device" in code else "eager"
    assert re.search(rf"^\w+: {expected} \(", printed, re.MULTILINE), printed


def test_the_compiled_example_is_among_the_blocks():
    assert sum("torch.compile(fullgraph=True)" in code for code in BLOCKS) == 1


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_docstring_example_runs(example):
    result = doctest.DocTestRunner().run(example)
    assert result.attempted > 0
    assert result.failed == 0


def public_ops():
    return {x.__name__ for x in PUBLIC if x in dispatch._explained}


def test_every_public_op_has_an_example():
    assert "polar_attention" in public_ops()
    assert public_ops() | set(graphs.__all__) <= {example.name for example in EXAMPLES}


def test_op_table_lists_every_public_op():
    listed = set(re.findall(r"^\| `(\w+)`", TEXT, re.MULTILINE))
    assert public_ops() == listed & set(ops.__all__)


def test_bench_markers_stand_in_order():
    begin, end = "<!-- bench:begin -->", "<!-- bench:end -->"
    assert TEXT.count(begin) == TEXT.count(end) == 1
    assert TEXT.index(begin) < TEXT.index(end)
