"""fastweights: GPU kernels for sequence models that write to a memory while they read.

`fastweights.ops` holds the ops, `fastweights.graphs` the models, `fastweights.autotune` the config
spaces, `fastweights.bench` the benchmark and `fastweights.reference` the literal definitions.

Importing this package imports neither Triton nor CuPy.
"""

from pathlib import Path as _Path

__version__ = "0.1.0"

# In a checkout the sub-packages are the top-level folders beside this one; in a wheel they are
# installed inside it. One line makes `fastweights.ops` mean the same thing in both.
_checkout = _Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "ops" / "__init__.py").is_file():
    __path__.append(str(_checkout))
del _checkout
