"""The commands as they are called, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fastweights.autotune import cli, tables
from fastweights.autotune.log import lines
from fastweights.autotune.tables import Row, Table

HERE = Path(__file__).resolve().parent
OP = "probe_op.tuning"


class Command:
    """`fastweights autotune …` on the tests' op, with a cache of its own."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.shapes = folder / "shapes.json"

    def start(self, *arguments: str, configs: str = "10 8 9", **extra: str) -> Any:
        paths = [str(HERE), *(path for path in sys.path if path)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "FASTWEIGHTS_CACHE": str(self.cache),
            "PROBE_CONFIGS": configs,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "fastweights.autotune.cli", *arguments],
            env=environment | extra,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, code: int = 0, **how: str) -> str:
        process = self.start(*arguments, **how)
        out, error = process.communicate(timeout=200)
        assert process.returncode == code, out + error
        return out + error

    def sweep(self, *arguments: str, **how: Any) -> str:
        return self.run("sweep", OP, *arguments, **how)

    def with_shapes(self, *columns: int) -> tuple[str, str]:
        self.shapes.write_text(json.dumps([{"m": 512, "n": n} for n in columns]))
        return "--shapes", str(self.shapes)

    @property
    def table(self) -> Table:
        return tables.load(self.cache / "tables" / "nvidia-test.json")

    @property
    def log(self) -> Path:
        return self.cache / "log" / "sweep-probe_op-tuning.jsonl"

    def events(self) -> list[tuple[str, str]]:
        return [(entry["event"], entry.get("config", "")) for entry in lines(self.log)]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


def chosen(rows: tuple[Row, ...]) -> set[str]:
    return {row.config for row in rows if row.pass_ == "fwd"}


def test_a_sweep_prints_and_writes_what_it_found(command: Command) -> None:
    said = command.sweep("--seed", "5", configs="10 8:racy 9 7:wrong")
    best = "block16-cost902-fault0-wide0-w4-s2"
    assert chosen(command.table.rows) == {best}
    assert len(command.table.rows) == 6  # three buckets, forward and backward
    assert "probe_op.tuning on nvidia-test: 6 cases, seed 5" in said
    assert "6 rejected" in said
    assert said.count("is unrepeatable: run") == said.count("is wrong against float64") == 3
    assert f"{best}" in said
    assert "6 cases measured, 0 left" in said
    shown = command.run("show")
    assert "nvidia-test, sm_90" in shown
    assert "is unrepeatable" in shown


def test_a_case_without_a_right_config_is_an_exit_status(command: Command) -> None:
    said = command.sweep(*command.with_shapes(32), configs="10:wrong", code=4)
    assert "NO CONFIG IS RIGHT probe_op/fwd/triton 512x32 fp32" in said


def test_a_config_that_kills_its_process_is_rejected_and_the_rest_goes_on(
    command: Command,
) -> None:
    command.sweep(*command.with_shapes(32), configs="10 8:dies 9")
    assert chosen(command.table.rows) == {"block16-cost902-fault0-wide0-w4-s2"}
    (entry,) = command.table.rejected
    assert entry.reason == "killed its process (SIGABRT)"


def test_kernels_are_compiled_before_they_run(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    compiling = {"PROBE_KERNELS": "1", "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command.sweep(*command.with_shapes(32), configs="10 8:uncompilable 9", **compiling)
    assert chosen(command.table.rows) == {"block16-cost902-fault0-wide0-w4-s2"}
    (entry,) = command.table.rejected
    assert entry.reason.startswith("double does not compile: CompilationError")
    assert ("begin", entry.config) not in command.events()  # it never ran
    (kernel,) = next(row for row in command.table.rows if row.pass_ == "fwd").notes["kernels"]
    assert kernel["kernel"] == "double"
    assert (kernel["matrix"], kernel["stack"]) == ("fma", 0)
    assert kernel["registers"] > 0


def test_a_config_that_hangs_is_rejected_and_the_rest_goes_on(command: Command) -> None:
    command.sweep(*command.with_shapes(32), "--patience", "12", configs="10 8:hangs 9")
    assert chosen(command.table.rows) == {"block16-cost902-fault0-wide0-w4-s2"}
    (entry,) = command.table.rejected
    assert entry.reason == "did not return within 12 s"


def test_a_killed_sweep_goes_on_where_it_was(command: Command) -> None:
    """The watcher is killed: its process ends too, and no config is blamed."""
    configs = "10 8:wrong 9 7:hangs"
    process = command.start("sweep", OP, *command.with_shapes(32), configs=configs)
    hanging = ("begin", "block16-cost703-fault7-wide0-w4-s2")
    deadline = time.monotonic() + 120
    while hanging not in command.events():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    pid = lines(command.log)[-1]["pid"]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    while _alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    before = command.events()
    assert hanging == before[-1]
    command.sweep(*command.with_shapes(32), "--patience", "12", configs=configs)
    after = command.events()[len(before) :]
    assert after[0] == hanging
    done = [event for event in before if event[0] in ("checked", "rejected")]
    assert done
    again = {config for event, config in after[:2] if event == "begin"}
    assert again == {hanging[1]}  # what had been checked before was not begun again
    assert len(command.table.rows) == 2
    assert {e.reason for e in command.table.rejected if "fault7" in e.config} == {
        "did not return within 12 s"
    }


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def test_a_budget_ends_a_sweep_and_the_next_run_finishes_it(command: Command) -> None:
    said = command.sweep("--budget", "0", code=3)
    assert "0 cases measured, 6 left" in said
    assert "6 cases measured, 0 left" in command.sweep()


def test_shards_and_merge_are_the_whole(command: Command, tmp_path: Path) -> None:
    command.sweep("--out", str(tmp_path / "whole.json"))
    whole = tables.load(tmp_path / "whole.json")
    parts = []
    for i in range(2):
        parts.append(str(tmp_path / f"part{i}.json"))
        command.sweep("--shard", f"{i}/2", "--out", parts[-1])
    assert [len(tables.load(Path(part)).rows) for part in parts] == [3, 3]
    merged = tmp_path / "merged.json"
    assert "6 rows, 0 rejected" in command.run("merge", str(merged), *parts)
    assert [row.times for row in tables.load(merged).rows] == [row.times for row in whole.rows]
    said = command.run("diff", str(merged), str(tmp_path / "whole.json"))
    assert said.strip() == "no difference"


def test_shards_may_write_one_table_at_once(command: Command) -> None:
    running = [command.start("sweep", OP, "--shard", f"{i}/3") for i in range(3)]
    for process in running:
        assert process.wait(timeout=200) == 0, process.communicate()
    assert len(command.table.rows) == 6
    folder = command.cache / "tables"
    assert [path.name for path in folder.iterdir()] == ["nvidia-test.json"]


def test_what_cannot_be_done_is_said_in_one_line(command: Command, tmp_path: Path) -> None:
    said = command.sweep(code=2, FASTWEIGHTS_READONLY="1")
    assert said.strip().endswith("a read-only cache never sweeps")
    assert not command.cache.exists()
    said = command.sweep("--dtype", "int8", code=2)
    assert "unknown dtype 'int8'" in said
    command.shapes.write_text('[{"m": 512, "height": 3}]')
    assert "'height'" in command.sweep("--shapes", str(command.shapes), code=2)
    said = command.run("sweep", "no_such_op", code=2)
    assert "there is no op 'no_such_op'" in said
    (tmp_path / "torn.json").write_text("{")
    said = command.run("show", str(tmp_path / "torn.json"), code=2)
    assert "torn.json: not a whole JSON file" in said
    assert "I/N with 0 ≤ I < N" in command.run("sweep", OP, "--shard", "2/2", code=2)


def test_a_machine_without_a_gpu_measures_nothing(command: Command) -> None:
    said = command.run("sweep", "newton_schulz", code=2, CUDA_VISIBLE_DEVICES="")
    assert "torch sees no GPU, and configs are measured on one" in said


# ---- explain, in this process -------------------------------------------------------------------


def test_explain_takes_sizes_by_their_letters(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["polar_attention", "--shape", "B=1", "T=64,D=32", "Hq=4", "Hk=2", "window=8"]
    assert cli.explain([*call, "--device", "cpu"]) == 0
    assert "polar_attention: eager (first of cuda, triton, eager" in capsys.readouterr().out
    call = ["softmax_attention", "--shape", "T=64", "D=32", "--dtype", "fp32"]
    assert cli.explain([*call, "--device", "cpu", "--backend", "triton"]) == 0
    said = capsys.readouterr().out
    if os.environ.get("TRITON_INTERPRET") == "1":
        assert "(closed-form default)" in said
    for op in ("newton_schulz", "gram_newton_schulz_factor"):
        assert cli.explain([op, "--shape", "B=3", "m=16", "--device", "cpu"]) == 0
        assert f"{op}: eager" in capsys.readouterr().out


def test_explain_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for call, words in (
        (["nothing", "--shape", "T=1"], "there is no op 'nothing'"),
        (["explain", "--shape", "T=1"], "there is no op 'explain'"),
        (["polar_attention", "--shape", "T=1"], "'D'"),
        (["polar_attention", "--shape", "T=8", "D=16", "X=3"], "'X'"),
        (["polar_attention", "--shape", "T=many"], "NAME=SIZE"),
        (["polar_attention", "--shape", "T=8", "D=300", "--device", "cpu"], "256"),
    ):
        assert cli.explain(call) == 2
        assert words in capsys.readouterr().err, call
