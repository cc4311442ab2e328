"""The public ops. Each is a torch custom op with eager, Triton and CUDA C++ implementations.

Letters in shapes, here and in every file:

| letter       | meaning                                                            |
|--------------|--------------------------------------------------------------------|
| B            | batch                                                              |
| T, Tq, Tk    | tokens; query tokens, key tokens (packed: all sequences together)  |
| N            | number of packed sequences                                         |
| H, Hq, Hk    | heads; query heads, key/value heads; G = Hq / Hk                   |
| D, Dk, Dv    | head width; key width, value width                                 |
"""

from .dispatch import Explanation, explain, use_backend
from .polar_attention import PolarStats, polar_attention, softmax_attention

__all__ = [
    "Explanation",
    "PolarStats",
    "explain",
    "polar_attention",
    "softmax_attention",
    "use_backend",
]
