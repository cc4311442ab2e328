"""The literal definitions, in plain torch and float64 if asked: no backend, no cleverness."""

from .atlas import atlas_memory
from .delta_rewrite import delta_rewrite
from .gated_delta import gated_delta_rule
from .newton_schulz import gram_newton_schulz_factor, newton_schulz
from .omega import OmegaGradient, OmegaState, omega_gradient, omega_memory
from .polar_attention import PolarStats, polar_attention, softmax_attention
from .polar_decode import paged_cache_write_, polar_decode
from .polynomial import polynomial_features, polynomial_read, polynomial_update
from .short_conv import short_conv

__all__ = [
    "OmegaGradient",
    "OmegaState",
    "PolarStats",
    "atlas_memory",
    "delta_rewrite",
    "gated_delta_rule",
    "gram_newton_schulz_factor",
    "newton_schulz",
    "omega_gradient",
    "omega_memory",
    "paged_cache_write_",
    "polar_attention",
    "polar_decode",
    "polynomial_features",
    "polynomial_read",
    "polynomial_update",
    "short_conv",
    "softmax_attention",
]
