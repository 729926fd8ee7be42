"""Kernels that are launched early: while the one before still runs (programmatic dependent launch, Hopper and newer).

From the end of one kernel to the start of the next some time goes by. A kernel that is launched early (its
constant `EARLY`, see `Launch.start_early`) is on its multiprocessors by then. It begins with `await_previous`: until
all kernels before have ended and what they wrote is visible. Then it lets the next one come, `admit_next`. A kernel
that waits for peers does so only when they are there: whoever is admitted keeps its multiprocessors from other work.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def await_previous(EARLY: tl.constexpr):
    """Nothing of earlier kernels is read, and nothing that they read is written, before this."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def admit_next(EARLY: tl.constexpr):
    """The next kernel can be launched once all programs have come here, or ended."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
