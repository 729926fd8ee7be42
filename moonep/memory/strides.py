"""Strides of tensors over mapped memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def dense_strides(shape: Sequence[int], dtype: torch.dtype, row_stride_bytes: int | None) -> tuple[int, ...]:
    """Strides in elements of dense rows that begin `row_stride_bytes` apart (None: right after one another)."""
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return strides if row_stride_bytes is None else (row_stride_bytes // dtype.itemsize, *strides[1:])
