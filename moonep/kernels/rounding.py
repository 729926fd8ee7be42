"""fp32 to the payload dtype, to nearest even, on the GPU and in the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_to(value, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """value fp32 -> dtype. The interpreter truncates to bf16, so there it is rounded in integers first."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        bits = tl.where(value == value, rounded, bits | 0x400000)
        value = bits.to(tl.float32, bitcast=True)
    return value.to(dtype)
