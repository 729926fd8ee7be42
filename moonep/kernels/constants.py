"""What kernels know of the plan's encodings, for use inside kernels."""

from __future__ import annotations

import triton.language as tl

from moonep import plan

INT32_MIN = tl.constexpr(plan.INT32_MIN)
NO_ARRIVAL = tl.constexpr(plan.NO_ARRIVAL)
ARRIVAL_ROW = tl.constexpr(plan.ARRIVAL_ROW)
ARRIVAL_SHIFT = tl.constexpr(plan.ARRIVAL_SHIFT)
