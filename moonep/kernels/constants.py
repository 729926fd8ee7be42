"""What kernels know of the plan's encodings, for use inside kernels."""

from __future__ import annotations

import triton.language as tl

from moonep import plan

INT32_MIN = tl.constexpr(plan.INT32_MIN)
LINK_HEAD = tl.constexpr(plan.LINK_HEAD)
LINK_VALUE = tl.constexpr(plan.LINK_VALUE)
