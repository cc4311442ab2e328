"""What the driver does with any op family, shown on one of three lines: y = 2x."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from fastweights import bench
from fastweights.bench import ceilings, cli, families, gate, readme, record, runner, table
from fastweights.bench.cases import SUITES, Case, Target
from fastweights.bench.family import Contender, Family, Results, Unavailable, Work
from fastweights.ops import alloc

CPU = torch.device("cpu")


@dataclass(frozen=True)
class DoubleCase(Case):
    op: ClassVar[str] = "double"
    numbers: int = 300

    def flops(self, mode):
        return self.numbers

    def bytes(self, mode):
        return 2 * self.numbers * self.torch_dtype.itemsize

    def sizes(self):
        return {"n": self.numbers, "dtype": self.dtype}

    def small(self):
        return replace(self, numbers=256)


CASE = DoubleCase(
    "double-300", ("quick",), dtype="fp32", device="cpu", peers=("sum", "floor"),
    targets=(
        Target("double", "fwd", "sum", 1e-9),
        Target("double", "fwd", "sum", 3.0, 2.0, 1.0, measure="error"),
        Target("double", "fwd", "sum", 3.0, measure="nothing that is recorded"),
    ),
)  # fmt: skip


def _double(call):
    def build(case, inputs):
        x, upstream = inputs
        return Work(lambda: (call(x),), {"x": x}, (upstream,))

    return build


def _refuse(case, inputs):
    raise Unavailable("no unit that doubles")


class Double(Family[DoubleCase, tuple]):
    op = "double"
    cases = (CASE,)
    peers = {"sum": "x + x", "floor": "a copy"}  # noqa: RUF012
    backends = ("auto", "abacus")
    ratios = {"out": "error"}  # noqa: RUF012
    caption = "`double`: twice as much."

    def __init__(self, call=lambda x: x * 2.000001):
        self.call = call

    def inputs(self, case, generator):
        x = torch.randn(case.numbers, generator=generator, dtype=case.torch_dtype)
        return x.requires_grad_(), torch.ones_like(x)

    def ours(self, case, backends):
        builds = {"auto": _double(self.call), "abacus": _refuse}
        marks = {backends[0]: ""}
        return [
            Contender("double" + marks.get(b, f" [{b}]"), case, "double", builds[b], ours=True)
            for b in backends
        ]

    def others(self, case, names, layout):
        found = [
            Contender("sum", case, "double", _double(lambda x: x + x * 1.000003)),
            Contender(
                "floor", case, "copy", _double(torch.clone), modes=("fwd",), checked=False
            ),
        ]  # fmt: skip
        return [contender for contender in found if contender.name in names]

    def _compare(self, case, inputs, got):
        x, upstream = inputs
        truth = {"out": 2 * x.double(), "d_x": 2 * upstream.double()}
        plain = {"out": x + x * 1.000003, "d_x": 2.000003 * upstream}
        return Results(got, {name: truth[name] for name in got}, plain)

    def whole(self, contender, case, inputs, work, got):
        return self._compare(case, inputs, got)

    def part(self, contender, case, inputs, work, got):
        return self._compare(case, inputs, got)


@pytest.fixture
def family(monkeypatch):
    """The family entered in the list: all that adding an op takes outside of its own files."""
    made = Double()
    monkeypatch.setitem(families.FAMILIES, "double", made)
    return made


def _options(**changes) -> runner.Options:
    return runner.Options(device=CPU, seed=3, seconds=0.01, **changes)


def _recorded(rows):
    where = {"device": "NVIDIA H200", "torch": "2.11"}
    rates = {"bf16": {"4096": 700.0}, "fp32": {"4096": 50.0}}
    ceilings = {"copy_gbps": 4250.0, "matmul_tflops": rates}
    return record.make(rows, environment=where, ceilings=ceilings, seed=1)


# ---- the list -----------------------------------------------------------------------------------


def test_the_driver_knows_no_op():
    folder = Path(bench.__file__).parent
    words = [*(word for op in families.FAMILIES for word in op.split("_")), "softmax", "heads", "q"]
    assert "attention" in words
    common = {path for path in folder.glob("*.py") if not path.name.startswith("test_")}
    common -= {folder / "families.py", folder / "__init__.py"}
    assert len(common) > 12
    found = [
        f"{path.name}: {word}"
        for path in common
        for word in words
        if re.search(rf"(?<![a-z]){word}(?![a-z])", path.read_text(), re.IGNORECASE)
    ]
    assert not found


def test_names_are_unique_and_plain():
    names = Counter(case.name for family in families.FAMILIES.values() for case in family.cases)
    assert max(names.values()) == 1
    for op, family in families.FAMILIES.items():
        assert family.op == op
        for case in family.cases:
            assert case.op == op
            assert set(case.suites) <= set(SUITES) - {"all"}
            assert set(case.peers) <= set(family.peers)


@pytest.mark.parametrize("case", families.cases().values(), ids=lambda case: case.name)
def test_targets_of_a_case_can_be_judged(case):
    found = families.FAMILIES[case.op].contenders(case)
    assert all(contender.checked or not contender.ours for contender in found)
    modes = {contender.name: contender.modes for contender in found}
    assert len(modes) == len(found)
    for target in case.targets:
        assert target.mode in case.modes
        assert target.mode in modes[target.against]
        assert target.mode in modes[target.contender]
        marks = [mark for mark in (target.floor, target.good, target.aim) if mark is not None]
        assert marks == sorted(marks, reverse=target.lower_is_better)


def test_suites_of_the_command_are_those_of_the_cases(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--suite", "nothing"])
    said = capsys.readouterr().err
    assert all(suite in said for suite in SUITES)


def test_select_finds_a_new_family(family):
    assert families.select("cpu", ops=["double"]) == [CASE]
    (case,) = families.select("cpu", names=["double-300"], dtype="fp64")
    assert (case.name, case.dtype, case.targets) == ("double-300-fp64", "fp64", ())


# ---- rows ---------------------------------------------------------------------------------------


def test_rows_of_any_family(family):
    rows = {(row["contender"], row["mode"]): row for row in runner.run([CASE], _options())}
    assert list(rows) == [
        (name, mode)
        for mode in ("fwd", "bwd")
        for name in ("double", "double [abacus]", "sum", "floor")
        if (name, mode) != ("floor", "bwd")
    ]
    for mode in ("fwd", "bwd"):
        row = rows["double [abacus]", mode]
        assert (row["status"], row["reason"]) == ("unavailable", "no unit that doubles")
    row = rows["double", "fwd"]
    assert row["status"] == "ok"
    assert row["gate"]["ratios"]["error"] == pytest.approx(1 / 3, rel=0.2)
    assert [(t["measure"], t["reached"]) for t in row["targets"]] == [
        ("speed", "floor"), ("error", "aim"),
    ]  # fmt: skip
    assert rows["sum", "fwd"]["gate"]["ratios"] == {"error": 1.0}
    assert rows["floor", "fwd"]["status"] == "ok"
    assert rows["floor", "fwd"]["gate"] is None
    assert table.cells(rows["floor", "fwd"])[11] == "–"
    assert "0.3" in table.cells(row)[12]
    assert "× error of sum (floor 3.00 good 2.00 aim 1.00 → aim)" in table.cells(row)[12]


def test_peers_and_backends_are_chosen(family):
    rows = runner.run([CASE], _options(peers=("floor",), backends=("abacus",)))
    assert [(row["contender"], row["mode"]) for row in rows] == [
        ("double", "fwd"), ("floor", "fwd"), ("double", "bwd"),
    ]  # fmt: skip


def test_wrong_result_of_any_family(family):
    family.call = lambda x: x * 2.001
    rows = runner.run([CASE], _options(peers=()))
    assert {row["status"] for row in rows} == {"wrong", "unavailable"}
    assert "small out" in rows[0]["reason"]


def test_full_size_runs_on_poisoned_memory(family):
    """Memory that is left unwritten only at the size that is timed."""

    def forgetful(x):
        fresh = alloc.empty(x.shape, dtype=x.dtype, device=CPU)
        lucky = fresh if alloc._poisoned and x.numel() == CASE.numbers else 2 * x.detach()
        return 2 * x - 2 * x.detach() + lucky

    family.call = forgetful
    inputs = family.inputs(CASE, torch.Generator().manual_seed(0))
    contender = family.ours(CASE, ("auto",))[0]
    verdict = gate.check(family, contender, inputs, contender.build(CASE, inputs), seed=1)
    assert [line.split(":")[0] for line in verdict.failures] == ["full size out"]
    assert "ratios" not in replace(verdict, ratios={"error": float("inf")}).to_dict()


def test_a_gate_that_compares_nothing_is_no_gate(family, monkeypatch):
    monkeypatch.setattr(Double, "part", lambda *_: Results({}, {}, {}))
    rows = runner.run([CASE], _options(peers=()))
    assert rows[0]["reason"] == "ValueError: full size: nothing was compared"


@pytest.mark.parametrize("modes", [("fwd",), ("fwd", "bwd")], ids=str)
def test_backward_of_a_peer_runs_where_it_is_timed(family, modes):
    case, seen = replace(CASE, modes=modes), []
    (peer, _) = family.others(case, ("sum", "floor"), "model")

    def build(case, inputs):
        work = peer.build(case, inputs)
        backward = work.backward
        work.backward = lambda *args, **rest: seen.append("bwd") or backward(*args, **rest)
        return work

    inputs = family.inputs(case, torch.Generator().manual_seed(0))
    verdict = gate.check(family, peer, inputs, build(case, inputs), seed=1)
    assert verdict.ok
    assert seen == ["bwd"] * (len(modes) - 1)


@pytest.mark.parametrize(
    ("seconds", "first", "second"),
    [
        (10.0, 2, 4),  # 20 of the first 25 leave 5: the case that begins at 30 may
        (18.0, 2, 2),
        (26.0, 1, 1),  # an overrun costs the next op nothing
    ],
)
def test_budget_is_shared_among_the_ops(family, monkeypatch, seconds, first, second):
    clock, ran = [0.0], Counter()

    def run_case(case, *_):
        clock[0] += seconds
        ran[case.op] += 1
        return []

    monkeypatch.setattr(runner.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(runner, "run_case", run_case)
    rows = runner.run([families.cases()["cpu-d64-t256"]] * 2 + [CASE] * 4, _options(budget=50.0))
    assert ran == {"polar_attention": first, "double": second}
    assert {row["status"] for row in rows} <= {"skipped"}
    assert len({row["op"] for row in rows}) == (first < 2) + (second < 4)


# ---- records and README -------------------------------------------------------------------------


def _two_ops():
    row = {
        "case": "c", "mode": "fwd", "contender": "double", "ours": True, "status": "ok",
        "reason": None, "ms": 2.0, "tflops": 50.0, "mfu_peak": 0.5, "targets": [],
    }  # fmt: skip
    refused = {"contender": "double [abacus]", "status": "unavailable", "reason": "a | b"}
    attention = {"op": "polar_attention", "sizes": {"dtype": "bf16"}, "contender": "polar"}
    double = {"op": "double", "sizes": {"n": 3, "dtype": "fp32"}}
    return [row | double, row | double | refused, row | attention]


def test_a_run_is_kept_as_a_record_an_op():
    double, attention = record.by_op(_recorded(_two_ops()))
    assert [row["contender"] for row in double["rows"]] == ["double", "double [abacus]"]
    assert list(double["ceilings"]["matmul_tflops"]) == ["fp32"]
    assert list(attention["ceilings"]["matmul_tflops"]) == ["bf16"]
    assert record.default_path(double).parts[-2:] == ("nvidia-h200", "double.json")
    assert record.default_path(attention, ".png").name == "polar_attention.png"
    assert double["environment"] == attention["environment"]


def test_readme_shows_records_in_the_order_of_the_families(family, tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"{readme.BEGIN}\n{readme.END}")
    for part in record.by_op(_recorded(_two_ops())):
        name = record.default_path(part).name
        record.write(tmp_path / "results" / "nvidia-h200" / name, part)
    assert readme.update(path, tmp_path / "results") == 2
    text = path.read_text()
    assert text.count("**NVIDIA H200, torch 2.11") == 2
    assert text.index("| c fwd  | polar") < text.index(Double.caption) < text.index("| double  ")
    assert text.count(Double.caption) == 1
    assert re.search(r"\| double \[abacus\] \| unavailable \| – +\| a \\\| b +\|", text)


def test_command_keeps_a_file_an_op(family, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    measured = {"copy_gbps": 1.0, "matmul_tflops": {"fp32": {"1024": 1.0}}}
    monkeypatch.setattr(ceilings, "measure", lambda *_: measured)
    arguments = ["bench", "--device", "cpu", "--cases", "double-300", "cpu-d64-t256"]
    arguments += ["--seconds", "0.01", "--mode", "fwd", "--budget", "600"]
    assert cli.main([*arguments, "--json"]) == 0
    kept = {path.name: record.read(path) for path in (tmp_path / "cpu").iterdir()}
    assert set(kept) == {"double.json", "polar_attention.json"}
    assert {row["op"] for row in kept["double.json"]["rows"]} == {"double"}
    assert kept["double.json"]["seed"] == kept["polar_attention.json"]["seed"]
    one = tmp_path / "both.json"
    assert cli.main([*arguments, "--json", str(one)]) == 0
    assert {row["op"] for row in record.read(one)["rows"]} == {"double", "polar_attention"}
    capsys.readouterr()
    assert cli.main(["bench", "--compare", str(tmp_path / "cpu" / "double.json"), str(one)]) == 0
    said = capsys.readouterr().out
    assert "double-300" in said
    assert "not in A" in said


def test_command_lists_peers_with_their_op(family, capsys):
    assert cli.main(["bench", "--list", "double"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^floor +double +a copy$", said, re.MULTILINE)
    assert "sdpa" not in said
