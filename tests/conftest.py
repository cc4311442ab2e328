"""What every test relies on: the Triton interpreter without a GPU, threads, seeds, marks."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Triton reads this when a kernel is decorated, so it has to be set before the first import.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    if "s" not in config.option.reportchars and "a" not in config.option.reportchars:
        config.option.reportchars += "s"  # a skip always prints its reason
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        _mend_interpreter()


def _mend_interpreter() -> None:
    """Let Triton's interpreter run `range()` over run-time bounds with numpy 2.4 and later.

    Its `tensor.__index__` calls int() on an array of shape (1,), which numpy 2.4 refuses
    (Triton 3.4 to 3.6).
    """
    from triton.runtime import interpreter

    original = getattr(interpreter, "_patch_lang_tensor", None)
    if original is None:
        return

    def patch(tensor: type, *scope: object) -> None:
        original(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, this machine has none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _working_context(request: pytest.FixtureRequest) -> None:
    """Leave a process whose CUDA context a kernel has broken: every later test would fail.

    Under pytest-xdist another worker takes the tests that remain; alone, the run ends here.
    """
    if not (HAS_CUDA and request.node.get_closest_marker("gpu")):
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(70)
        pytest.exit(f"an earlier test broke the CUDA context: {error}", returncode=70)


@pytest.fixture(autouse=True)
def _fixed_state(_working_context: None) -> None:
    """Seeds, and IEEE fp32 in torch's own matmuls: the yardsticks are not to use TF32."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture
def device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if HAS_CUDA else torch.device("cpu")
