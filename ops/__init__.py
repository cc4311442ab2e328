"""The public ops. Each is a torch custom op with eager, Triton and CUDA C++ implementations.

Letters in shapes, here and in every file:

| letter       | meaning                                                            |
|--------------|--------------------------------------------------------------------|
| B            | batch                                                              |
| T, Tq, Tk    | tokens; query tokens, key tokens (packed: all sequences together)  |
| N            | number of packed sequences                                         |
| H, Hq, Hk    | heads; query heads, key/value heads; G = Hq / Hk                   |
| D, Dk, Dv    | head width; key width, value width                                 |
| K            | taps of a convolution                                              |
| S            | slots of a pool of states                                          |
| M            | memory tokens of a segment                                         |
| P            | features of a key, rows of the delta rewrite's state               |
| m, n         | rows and columns of a matrix; "..." are any leading dimensions     |
"""

from .atlas import atlas_memory
from .atlas.cache import AtlasCache, atlas_cache, atlas_extend
from .atlas_step import atlas_step_
from .delta_rewrite import delta_rewrite, delta_rewrite_
from .dispatch import Explanation, explain, use_backend
from .gated_delta import gated_delta_rule
from .gated_delta_step import gated_delta_step, gated_delta_step_
from .newton_schulz import gram_newton_schulz_factor, newton_schulz
from .omega import (
    OmegaGradient,
    OmegaHealth,
    OmegaState,
    omega_exact,
    omega_gradient,
    omega_health,
    omega_memory,
    omega_step_size,
)
from .omega.cache import OmegaCache, omega_cache, omega_extend
from .omega_step import omega_step_
from .paged_cache_write import paged_cache_write_
from .polar_attention import PolarStats, polar_attention, softmax_attention
from .polar_decode import polar_decode
from .polynomial import polynomial_features, polynomial_read, polynomial_update
from .short_conv import short_conv
from .short_conv_step import short_conv_step_

__all__ = [
    "AtlasCache",
    "Explanation",
    "OmegaCache",
    "OmegaGradient",
    "OmegaHealth",
    "OmegaState",
    "PolarStats",
    "atlas_cache",
    "atlas_extend",
    "atlas_memory",
    "atlas_step_",
    "delta_rewrite",
    "delta_rewrite_",
    "explain",
    "gated_delta_rule",
    "gated_delta_step",
    "gated_delta_step_",
    "gram_newton_schulz_factor",
    "newton_schulz",
    "omega_cache",
    "omega_exact",
    "omega_extend",
    "omega_gradient",
    "omega_health",
    "omega_memory",
    "omega_step_",
    "omega_step_size",
    "paged_cache_write_",
    "polar_attention",
    "polar_decode",
    "polynomial_features",
    "polynomial_read",
    "polynomial_update",
    "short_conv",
    "short_conv_step_",
    "softmax_attention",
    "use_backend",
]
