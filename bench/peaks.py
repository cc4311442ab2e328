"""Dense peaks of data sheets: TFLOP/s by dtype (no sparsity) and memory bandwidth in TB/s.

fp32 is the rate of the plain units: fp32 results without TF32 run there. A GPU that is not listed
has no peak, and its tables show shares of measured ceilings alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..autotune.space import slug


@dataclass(frozen=True)
class Peak:
    """Dense TFLOP/s of 16-bit and fp32 arithmetic, and TB/s of memory."""

    half: float
    single: float
    bandwidth: float

    def tflops(self, dtype: str) -> float | None:
        """Peak of "bf16", "fp16" or "fp32"; None for others."""
        return {"bf16": self.half, "fp16": self.half, "fp32": self.single}.get(dtype)


# Matched in this order by substring of the device name: longer names first.
_PEAKS = (
    ("GH200", Peak(989.0, 67.0, 4.0)),
    ("H200 NVL", Peak(835.5, 60.0, 4.8)),
    ("H200", Peak(989.0, 67.0, 4.8)),
    ("H100 NVL", Peak(835.5, 60.0, 3.9)),
    ("H100 PCIe", Peak(756.0, 51.0, 2.0)),
    ("H100", Peak(989.0, 67.0, 3.35)),
    ("H800", Peak(989.0, 67.0, 3.35)),
    ("H20", Peak(148.0, 44.0, 4.0)),
    ("B200", Peak(2250.0, 75.0, 8.0)),
    ("A100-SXM4-80GB", Peak(312.0, 19.5, 2.039)),
    ("A100 80GB PCIe", Peak(312.0, 19.5, 1.935)),
    ("A100", Peak(312.0, 19.5, 1.555)),
    ("A10G", Peak(70.0, 35.0, 0.6)),
    ("L40S", Peak(362.0, 91.6, 0.864)),
    ("RTX 4090", Peak(165.2, 82.6, 1.008)),
    ("RTX 3090", Peak(71.0, 35.6, 0.936)),
)


def peak(device_name: str) -> Peak | None:
    """The data sheet of a GPU by its CUDA name or the slug of that, or None."""
    for part, values in _PEAKS:
        if slug(part) in slug(device_name):
            return values
    return None
