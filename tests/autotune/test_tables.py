"""Tables: what is looked up, what is passed over, and files that are not what they should be."""

from __future__ import annotations

import ast
import hashlib
import json
import textwrap
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from fastweights.autotune import Config, Device, Space, choose, source, space, tables, use_config
from fastweights.autotune.space import chosen
from fastweights.autotune.tables import Rejected, Row, Table
from fastweights.ops import cache, cuda_runtime
from fastweights.ops.newton_schulz import cuda_spaces, triton_large
from fastweights.ops.newton_schulz import triton_spaces as newton_schulz
from fastweights.ops.omega import triton_spaces as omega
from fastweights.ops.polar_attention import triton_spaces as polar

BIG, MIDDLE, SMALL = (Config.make(BLOCK=block) for block in (128, 64, 32))
GPU = Device("sm_90", shared_bytes=227 << 10, name="nvidia-test")


class Key(NamedTuple):
    size: int
    cols: int
    masked: bool


def make_space(**changes: Any) -> Space:
    fields = {
        "op": "probe",
        "pass_": "fwd",
        "backend": "triton",
        "configs": (BIG, MIDDLE, SMALL),
        "fits": lambda c, key, device: "too big" if c["BLOCK"] > key[1] else None,
        "bucket": lambda shape: Key(*shape),
        "default": lambda key, device: SMALL,
        "near": ("cols", "masked"),
    }
    return Space(**(fields | changes))


SPACE = make_space()
EXACT = Key(2, 128, True)


def row(config: Config = BIG, key: Key = EXACT, **changes: Any) -> Row:
    fields = {
        "op": "probe",
        "pass_": "fwd",
        "backend": "triton",
        "bucket": tables.named(key),
        "dtype": "bf16",
        "problem": "128 columns",
        "config": config.name,
        "winner": config.name,
        "default": SMALL.name,
        "times": {SMALL.name: 2.0, config.name: 1.0},
        "error": 0.5,
        "source": source.fingerprint(SPACE),
        "toolchain": {},
    }
    return Row(**(fields | changes))


def rejected(config: Config, key: Key = EXACT, **changes: Any) -> Rejected:
    fields = {
        "op": "probe",
        "pass_": "fwd",
        "backend": "triton",
        "bucket": tables.named(key),
        "config": config.name,
        "reason": "is wrong",
        "source": source.fingerprint(SPACE),
        "compiler": source.compiler("triton"),
        "arch": "sm_90",
    }
    return Rejected(**(fields | changes))


def table(*rows: Row, gpu: str = GPU.name, refused: tuple[Rejected, ...] = ()) -> Table:
    return Table(gpu, "sm_90", rows, refused)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty cache, no shipped table, nothing remembered."""
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FASTWEIGHTS_READONLY", raising=False)
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    space.reload()
    yield
    space.reload()


def ship(*rows: Row, name: str = GPU.name, **options: Any) -> Path:
    path = tables.SHIPPED / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(tables.dump(table(*rows, gpu=name, **options)))
    space.reload()
    return path


def own(*rows: Row, **options: Any) -> Path:
    path = tables.path_of(GPU.name)
    tables.update(path, table(*rows, **options))
    space.reload()
    return path


# ---- which config -------------------------------------------------------------------------------


def test_without_a_table_everything_is_the_default() -> None:
    found = chosen(SPACE, EXACT, GPU)
    assert (found.config, found.why) == (SMALL, "closed-form default")


def test_a_device_without_a_name_has_no_table() -> None:
    ship(row())
    assert choose(SPACE, EXACT, replace(GPU, name="")) == SMALL
    assert choose(SPACE, EXACT, GPU) == BIG


def test_forced_before_table_before_default() -> None:
    ship(row(MIDDLE))
    assert choose(SPACE, EXACT, GPU) == MIDDLE
    with use_config(SPACE, BIG):
        assert chosen(SPACE, EXACT, GPU).why == "forced"
        assert choose(SPACE, EXACT, GPU) == BIG


def test_exact_bucket_before_the_nearest_and_a_strict_field_is_never_bridged() -> None:
    ship(row(MIDDLE, Key(2, 64, True)), row(BIG, Key(2, 512, True)), row(BIG, Key(2, 512, False)))
    found = {cols: choose(SPACE, Key(2, cols, True), GPU) for cols in (64, 128, 256, 4096)}
    assert found == {64: MIDDLE, 128: MIDDLE, 256: BIG, 4096: BIG}
    assert chosen(SPACE, EXACT, GPU).why == ("table nvidia-test, nearest bucket 128 columns")
    assert choose(SPACE, Key(4, 512, True), GPU) == SMALL  # another element size
    assert choose(make_space(near=()), Key(2, 128, True), GPU) == SMALL
    assert choose(make_space(op="other"), Key(2, 64, True), GPU) == SMALL


def test_a_row_that_does_not_fit_or_has_left_the_space_is_passed_over() -> None:
    ship(row(BIG, Key(2, 64, True), times={BIG.name: 1.0, SMALL.name: 2.0}))
    assert choose(SPACE, Key(2, 64, True), GPU) == SMALL
    ship(row(MIDDLE), row(BIG, Key(2, 512, True)))
    without = make_space(configs=(BIG, SMALL))
    assert choose(without, Key(2, 128, True), GPU) == BIG  # the nearest that is still there


def test_a_users_row_beats_a_shipped_one() -> None:
    ship(row(MIDDLE), row(MIDDLE, Key(2, 512, True)))
    own(row(BIG))
    assert chosen(SPACE, EXACT, GPU).why == "own table nvidia-test"
    assert choose(SPACE, EXACT, GPU) == BIG
    assert choose(SPACE, Key(2, 512, True), GPU) == MIDDLE


def test_another_gpu_of_the_architecture_serves_where_this_one_has_no_row() -> None:
    ship(row(BIG), row(MIDDLE, Key(4, 64, True)), name="nvidia-other")
    ship(row(MIDDLE))
    assert choose(SPACE, EXACT, GPU) == MIDDLE
    found = chosen(SPACE, Key(4, 64, True), GPU)
    assert found.why == "table nvidia-other of the same architecture"
    assert choose(SPACE, Key(4, 64, True), replace(GPU, arch="sm_100")) == SMALL


def test_older_source_still_serves_and_says_so() -> None:
    ship(row(BIG, source="0" * 16))
    found = chosen(SPACE, EXACT, GPU)
    assert (found.config, found.why) == (BIG, "table nvidia-test")
    assert tables.reason(SPACE, found) == "table nvidia-test, measured on older source"
    assert tables.older(row(source="0" * 16), [SPACE])
    assert not tables.older(row(), [SPACE])
    ship(row(BIG))
    assert tables.reason(SPACE, chosen(SPACE, EXACT, GPU)) == "table nvidia-test"


def test_rejections_hold_for_source_compiler_and_architecture() -> None:
    ship(row(BIG), refused=(rejected(BIG),))
    assert choose(SPACE, EXACT, GPU) == SMALL
    assert choose(SPACE, Key(2, 256, True), GPU) == BIG  # another bucket
    for changes in ({"source": "0" * 16}, {"compiler": "triton 0.1"}, {"arch": "sm_80"}):
        ship(row(BIG), refused=(rejected(BIG, **changes),))
        assert choose(SPACE, EXACT, GPU) == BIG, changes


def test_a_rejected_default_is_replaced_and_if_nothing_is_left_it_is_said() -> None:
    ship(refused=(rejected(SMALL),))
    found = chosen(SPACE, EXACT, GPU)
    assert (found.config, found.why) == (BIG, "the default was rejected: is wrong")
    ship(refused=tuple(map(rejected, SPACE.configs)))
    with pytest.raises(RuntimeError, match=r"every config .* was rejected, block32-w4-s2 because"):
        choose(SPACE, EXACT, GPU)


def test_a_launch_parses_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    ship(row(BIG))

    def never(space: Space) -> str:
        raise AssertionError("parsed")

    with monkeypatch.context() as patch:
        patch.setattr(tables, "fingerprint", never)
        assert choose(SPACE, EXACT, GPU) == BIG


def test_files_are_read_once_and_again_after_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    path = ship(row(BIG))
    reads = []
    load = tables.load
    monkeypatch.setattr(tables, "load", lambda path: reads.append(path) or load(path))
    for cols in (128, 256, 512, 128):
        assert choose(SPACE, Key(2, cols, True), GPU) == BIG
    assert reads == [path]
    path.write_bytes(tables.dump(table(row(MIDDLE))))
    assert choose(SPACE, EXACT, GPU) == BIG
    space.reload()
    assert choose(SPACE, EXACT, GPU) == MIDDLE


# ---- files --------------------------------------------------------------------------------------


def test_a_file_holds_what_was_written() -> None:
    written = table(row(), row(MIDDLE, Key(4, 64, False)), refused=(rejected(SMALL),))
    path = tables.path_of(GPU.name)
    tables.update(path, written)
    assert tables.load(path) == tables.update(path, written)
    assert json.loads(path.read_text())["rows"][0]["pass"] == "fwd"
    assert [x.name for x in path.parent.iterdir()] == [path.name]


def test_update_replaces_a_bucket_and_keeps_the_others() -> None:
    own(row(BIG), row(MIDDLE, Key(4, 64, True)), refused=(rejected(MIDDLE),))
    kept = tables.load(own(row(MIDDLE)))
    assert [(r.bucket["size"], r.config) for r in kept.rows] == [(2, MIDDLE.name), (4, MIDDLE.name)]
    assert kept.rejected == ()  # what was said of the bucket before is gone
    with pytest.raises(ValueError, match="two GPUs"):
        tables.update(tables.path_of(GPU.name), table(gpu="nvidia-other"))


BROKEN = {
    "torn": '{"schema": 1, "rows": [',
    "empty": "",
    "older": json.dumps({"schema": 0, "rows": []}),
}
FOREIGN = {
    "list": "[]",
    "of something else": json.dumps({"rows": []}),
    "newer": json.dumps({"schema": 99, "rows": []}),
    "other fields": json.dumps(
        {"schema": 1, "gpu": "nvidia-test", "arch": "sm_90", "rows": [{"op": "x"}], "rejected": []}
    ),
    "no time": tables.dump(table(row(times={}))).decode(),
}


@pytest.mark.parametrize("text", [*BROKEN.values(), *FOREIGN.values()], ids=[*BROKEN, *FOREIGN])
def test_a_file_that_is_no_table_is_passed_over_and_said_once(text: str) -> None:
    path = tables.path_of(GPU.name)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    ship(row(MIDDLE))
    with pytest.warns(UserWarning, match=r"nvidia-test\.json: .*; it is not used"):
        assert choose(SPACE, EXACT, GPU) == MIDDLE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(SPACE, Key(2, 256, True), GPU) == MIDDLE


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_torn_or_old_file_is_replaced(text: str) -> None:
    path = tables.path_of(GPU.name)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.warns(UserWarning, match="it is replaced"):
        own(row())
    assert tables.load(path).rows == (row(),)


@pytest.mark.parametrize("text", FOREIGN.values(), ids=FOREIGN)
def test_somebody_elses_file_is_not_overwritten(text: str) -> None:
    path = tables.path_of(GPU.name)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(tables.Foreign):
        own(row())
    assert path.read_text() == text


def test_a_read_only_cache_is_read_and_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    path = own(row(BIG))
    before = path.read_bytes()
    monkeypatch.setenv("FASTWEIGHTS_READONLY", "1")
    space.reload()
    assert choose(SPACE, EXACT, GPU) == BIG
    with pytest.raises(PermissionError, match="FASTWEIGHTS_READONLY"):
        own(row(MIDDLE))
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_written_keeps_what_was_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = own(row(BIG))
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        own(row(MIDDLE))
    assert path.read_bytes() == before
    assert [x.name for x in path.parent.iterdir()] == [path.name]


def test_a_draft_of_a_killed_writer_goes_with_the_next_write() -> None:
    path = own(row(BIG))
    draft = path.parent / f".draft-{path.name}-abc"
    draft.write_text("half")
    own(row(MIDDLE))
    assert [x.name for x in path.parent.iterdir()] == [path.name]


def test_a_write_inside_a_read_only_cache_is_refused_and_outside_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTWEIGHTS_READONLY", "1")
    with pytest.raises(PermissionError):
        cache.replace(cache.home() / "x", b"1")
    cache.replace(tmp_path / "x", b"1")
    assert (tmp_path / "x").read_bytes() == b"1"


# ---- neighbours ---------------------------------------------------------------------------------


def measured(key: Key, winner: Config, big: float, middle: float, small: float) -> Row:
    times = {BIG.name: big, MIDDLE.name: middle, SMALL.name: small}
    return row(winner, key, times=times)


def configs(*rows: Row) -> list[str]:
    return [r.config for r in tables.Table(GPU.name, "sm_90").joined(table(*rows)).rows]


def test_neighbours_within_two_percent_share_a_config() -> None:
    a = measured(Key(2, 64, True), BIG, 1.0, 1.015, 2.0)
    b = measured(Key(2, 128, True), MIDDLE, 1.5, 1.0, 2.0)
    assert configs(a, b) == [MIDDLE.name] * 2
    far = measured(Key(2, 64, True), BIG, 1.0, 1.021, 2.0)
    assert sorted(configs(far, b)) == sorted([BIG.name, MIDDLE.name])


def test_sharing_never_costs_more_than_one_percent_of_the_default() -> None:
    a = measured(Key(2, 64, True), BIG, 1.0, 1.015, 1.001)
    b = measured(Key(2, 128, True), MIDDLE, 1.5, 1.0, 2.0)
    assert sorted(configs(a, b)) == sorted([BIG.name, MIDDLE.name])


def test_only_neighbours_share() -> None:
    a = measured(Key(2, 64, True), BIG, 1.0, 1.01, 2.0)
    b = measured(Key(2, 128, False), MIDDLE, 1.5, 1.0, 2.0)  # two fields apart
    assert sorted(configs(a, b)) == sorted([BIG.name, MIDDLE.name])


def test_joining_parts_is_joining_the_whole() -> None:
    rows = [
        measured(Key(2, 64, True), BIG, 1.0, 1.015, 2.0),
        measured(Key(2, 128, True), MIDDLE, 1.01, 1.0, 2.0),
        measured(Key(2, 256, True), SMALL, 3.0, 1.3, 1.0),
    ]
    empty = Table(GPU.name, "sm_90")
    whole = empty.joined(table(*rows))
    for first in range(3):
        parts = empty.joined(table(rows[first]))
        for other in (rows[first - 1], rows[first - 2]):
            parts = parts.joined(table(other))
        assert parts == whole
        assert parts.joined(whole) == whole


# ---- the hash of the source ---------------------------------------------------------------------

PROGRAM = '''
"""Docstring."""
import triton
from .{helper} import twice  # a comment

@triton.jit
def kernel(x, y):
    """Another."""
    return twice(x) + y  # and here
'''
HELPER = "def twice(x):\n    return 2 * x\n"


def hashed(folder: Path, name: str, text: str, helper: str = HELPER, **changes: Any) -> str:
    """The fingerprint of a space whose kernels are these texts."""
    (folder / f"{name}_helper.py").write_text(helper)
    (folder / f"{name}.py").write_text(text.format(helper=f"{name}_helper"))
    found = source.fingerprint(make_space(sources=(name,), **changes))
    (folder / f"{name}.py").unlink()
    return found


def test_code_counts_and_words_about_it_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)

    def same_name(text: str, helper: str = HELPER, **changes: Any) -> str:
        return hashed(tmp_path, "hashed", text, helper, **changes)

    first = same_name(PROGRAM)
    quiet = PROGRAM.replace("# and here", "").replace("Another.", "Else.").replace("+ y", "+  y")
    assert same_name(quiet) == first
    assert same_name(PROGRAM, "# why\n" + HELPER) == first
    assert same_name(PROGRAM.replace("+ y", "- y")) != first
    assert same_name(PROGRAM, HELPER.replace("2 *", "3 *")) != first
    assert same_name(PROGRAM, configs=(BIG, SMALL)) != first
    with pytest.raises(FileNotFoundError, match="no_such_module"):
        source.fingerprint(make_space(sources=("no_such_module",)))


def test_the_written_form_of_a_program_does_not_depend_on_python() -> None:
    """It was the same in 3.10, 3.11, 3.12 and 3.13 when it was put down here."""
    text = "def f(x, y: tl.int32 = -1, *z, k=None):\n    return x[1:, None] if y else f'{x!r:>3}'\n"
    tree = ast.parse(f"@jit\nclass A:\n    pass\n{text}a, b = (yield), [i for i in (1e-3, 'x')]\n")
    digest = hashlib.sha256(source.written(tree).encode()).hexdigest()
    assert digest[:16] == "fd68b5f2302fc348"


SPACES = {
    "polar fwd": polar.SPACE_FWD,
    "polar bwd": polar.SPACE_BWD,
    "newton_schulz fwd": newton_schulz.SPACE_FWD,
    "newton_schulz bwd": newton_schulz.SPACE_BWD,
    "factor fwd": newton_schulz.SPACE_FACTOR_FWD,
    "factor bwd": newton_schulz.SPACE_FACTOR_BWD,
    "symmetric": triton_large.SPACE_SYMMETRIC,
    "few": triton_large.SPACE_FEW,
    "cuda fwd": cuda_spaces.SPACE_FWD,
    "cuda bwd": cuda_spaces.SPACE_BWD,
}


@pytest.mark.parametrize("name", SPACES)
def test_every_space_names_its_sources_and_its_configs_apart(name: str) -> None:
    found = SPACES[name]
    assert found.sources
    assert len(source.fingerprint(found)) == 16
    assert len({config.name for config in found.configs}) == len(found.configs)


def test_cuda_texts_are_part_of_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastweights.ops import cuda_runtime

    monkeypatch.setattr(cuda_runtime, "CSRC", tmp_path)
    monkeypatch.setattr(cuda_runtime, "INCLUDE", tmp_path / "include")
    (tmp_path / "a.cuh").write_text('#include "b.cuh"\n')
    found = set()
    for text in ("int b;", "int c;"):
        (tmp_path / "b.cuh").write_text(textwrap.dedent(text))
        found.add(source.fingerprint(make_space(backend="cuda", sources=("a.cuh",))))
    assert len(found) == 2


def test_explain_says_where_a_config_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastweights import ops

    key = polar.SPACE_FWD.bucket
    q = torch.randn(1, 32, 2, 16)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    cpu = Device("cpu", shared_bytes=1 << 30, name="a-cpu")
    monkeypatch.setattr(Device, "of", staticmethod(lambda _: cpu))
    said = ops.explain(ops.softmax_attention, q, q, q, backend="triton")
    assert said.origins == {"fwd": "closed-form default", "bwd": "closed-form default"}
    _, shape = ops.dispatch.planned(ops.softmax_attention, q, q, q)
    other = next(c for c in polar.SPACE_FWD.fitting(key(shape), cpu) if c != said.configs["fwd"])
    entry = row(other, op="polar_attention", bucket=tables.named(key(shape)), source="0" * 16)
    path = tables.path_of("a-cpu")
    tables.update(path, Table("a-cpu", "cpu", (entry,)))
    space.reload()
    again = ops.explain(ops.softmax_attention, q, q, q, backend="triton")
    assert f"fwd: {other.name} (own table a-cpu, measured on older source)" in str(again)


# ---- which backend ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda_ms", "triton_ms", "same", "backend"),
    [
        (1.0, 0.97, True, "triton"),
        (1.0, 0.99, True, "cuda"),  # less than 2 %
        (1.0, 0.5, False, "cuda"),  # another problem says nothing
        (0.5, 1.0, True, "cuda"),
    ],
)
@pytest.mark.skipif(cuda_runtime.missing() is not None, reason=str(cuda_runtime.missing()))
def test_auto_takes_the_backend_that_was_measured_faster(
    cuda_ms: float, triton_ms: float, same: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastweights import ops

    x = torch.randn(2, 64, 64, dtype=torch.bfloat16)
    hopper = Device("sm_90", 232448, multiprocessors=132, name=GPU.name)
    monkeypatch.setattr(Device, "of", staticmethod(lambda _: hopper))
    assert ops.explain(ops.newton_schulz, x).backend == "cuda"
    package, shape = ops.dispatch.planned(ops.newton_schulz, x)
    rows = []
    for found, ms in ((cuda_spaces.SPACE_FWD, cuda_ms), (newton_schulz.SPACE_FWD, triton_ms)):
        key = found.bucket(shape)
        name = found.default(key, hopper).name
        changes = {
            "op": "newton_schulz",
            "backend": found.backend,
            "bucket": tables.named(key),
            "winner": name,
            "default": name,
            "times": {name: ms},
            "problem": "p" if same else found.backend,
        }
        rows.append(row(found.default(key, hopper), **changes))
    own(*rows)
    said = ops.explain(ops.newton_schulz, x)
    assert said.backend == backend
    assert (said.why == "measured faster than cuda") == (backend == "triton")
    module = ops.dispatch.resolve(package, shape, "auto")
    assert module.__name__.endswith(f".{backend}")
    # Backward was not measured: the order stands.
    backward = ops.dispatch.resolve(package, replace(shape, backward=True), "auto")
    assert backward.__name__.endswith(".cuda")


def test_auto_finds_the_rows_of_a_function_that_is_not_called_as_its_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fastweights import ops

    spaces = {
        name: replace(omega.SPACE_FWD, backend=name, sources=()) for name in ("cuda", "triton")
    }
    backends = {
        name: SimpleNamespace(supports=lambda shape, arch: None, SPACE_FWD=found)
        for name, found in spaces.items()
    }
    monkeypatch.setattr(ops.dispatch, "implementation", lambda package, name: backends.get(name))
    monkeypatch.setattr(Device, "of", staticmethod(lambda _: GPU))
    x = torch.randn(1, 8, 2, 16)
    call = {"q": x, "k": x, "v": x, "step": x[..., 0]}
    assert ops.explain(ops.omega_memory, **call).backend == "cuda"
    _, shape = ops.dispatch.planned(ops.omega_memory, **call)
    key = omega.SPACE_FWD.bucket(shape)
    config = omega.SPACE_FWD.default(key, GPU)
    for name, ms in (("cuda", 1.0), ("triton", 0.5)):
        changes = {"op": omega.SPACE_FWD.op, "backend": name, "default": config.name}
        own(row(config, key, times={config.name: ms}, **changes))
    assert ops.explain(ops.omega_memory, **call).why == "measured faster than cuda"
