"""The literal definitions, in plain torch and float64 if asked: no backend, no cleverness."""

from .polar_attention import PolarStats, polar_attention, softmax_attention

__all__ = ["PolarStats", "polar_attention", "softmax_attention"]
