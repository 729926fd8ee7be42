"""Assertions that say which element differs, and allocators whose output is poison until it is written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ULP_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FAR = torch.iinfo(torch.int64).max
# A large number in every integer type, and NaN or near the maximum when a byte buffer is read as floats.
_POISON_BYTE = 0x7F
_FLOAT8_NAN = {torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80, torch.float8_e8m0fnu: 0xFF}  # others: 0x7F


def assert_equal(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Asserts the same dtype, shape and bits. A NaN equals any NaN; 0.0 and -0.0 differ.

    Args:
        name: what the message calls the tensor.
        got: any shape, dtype, device and strides; the device may differ from that of `want`.
        want: the expected tensor.

    Raises:
        AssertionError: with the number of differing elements and the first one's index and values.
    """
    _check_comparable(name, got, want)
    same = _bits(got) == _bits(want)
    if got.is_floating_point():
        same |= _wide(got).isnan() & _wide(want).isnan()
    if not same.all():
        raise AssertionError(_differences(name, got, want, same))


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, rtol: float, atol: float) -> None:
    """Asserts the same dtype and shape, and `|got - want| <= atol + rtol * |want|`, computed in float64.

    NaN equals NaN, an infinity only the same infinity.

    Raises:
        AssertionError: as `assert_equal`, and the largest error.
    """
    _check_comparable(name, got, want)
    got_wide, want_wide = _wide(got), _wide(want)
    error = (got_wide - want_wide).abs()
    within = (error <= atol + rtol * want_wide.abs()) & got_wide.isfinite() & want_wide.isfinite()
    same = within | (got_wide == want_wide) | (got_wide.isnan() & want_wide.isnan())
    if not same.all():
        flat = torch.where(same, 0.0, error.nan_to_num(nan=torch.inf, posinf=torch.inf)).flatten()
        where = _index_text(int(flat.argmax()), got)
        tail = f"; largest error {flat.max().item():g} at {where}, allowed atol {atol:g} + rtol {rtol:g} * |want|"
        raise AssertionError(_differences(name, got, want, same) + tail)


def ulp_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Counts the representable numbers between a and b, elementwise.

    0.0 and -0.0 are the same number, as are two NaNs; a NaN is 2^63 - 1 away from any number. The largest finite
    number is one step from infinity.

    Args:
        a: bfloat16, float16 or float32.
        b: of the same dtype and shape.

    Returns:
        int64, of the same shape.
    """
    if a.dtype != b.dtype or a.dtype not in _ULP_DTYPES or a.shape != b.shape:
        raise ValueError(
            f"ulp_distance needs two tensors of one shape and one dtype of {_ULP_DTYPES}, got {_kind(a)} and {_kind(b)}"
        )
    distance = (_ordinal(a) - _ordinal(b)).abs()
    distance = torch.where(a.isnan() ^ b.isnan(), _FAR, distance)
    return torch.where(a.isnan() & b.isnan(), 0, distance)


@contextlib.contextmanager
def poisoned_allocators() -> Iterator[None]:
    """Within it, fresh memory is poison, so that a test sees a read of what was never written.

    `torch.empty`, `torch.empty_like`, `torch.empty_strided` and `Tensor.new_empty` return NaN in floating-point and
    complex tensors, bytes of 0x7F in integer ones, and leave bool as it is; gaps between the elements of a strided
    tensor are filled too. Not reached: allocations inside torch's own operators, and names that were imported before
    (`from torch import empty`).

    Source: the idea is flash-linear-attention's; `torch.utils.deterministic.fill_uninitialized_memory` does likewise,
    but only together with deterministic algorithms.
    """
    places = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")]
    originals = [getattr(owner, name) for owner, name in places]
    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, _poisoning(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


def _poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_poison(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        with torch.no_grad():
            _poison(tensor, whole_storage=kwargs.get("out") is None)
        return tensor

    return allocate_poison


def _poison(tensor: torch.Tensor, whole_storage: bool) -> None:
    if tensor.dtype == torch.bool or tensor.layout != torch.strided or tensor.is_quantized:
        return
    if whole_storage and type(tensor) is torch.Tensor:
        num_elements = tensor.untyped_storage().nbytes() // tensor.itemsize
        tensor = tensor.detach().as_strided((num_elements,), (1,), 0)
    if tensor.itemsize == 1:
        tensor.view(torch.uint8).fill_(_FLOAT8_NAN.get(tensor.dtype, _POISON_BYTE))
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(int.from_bytes([_POISON_BYTE] * tensor.itemsize, "little"))


def _check_comparable(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    for role, value in (("got", got), ("want", want)):
        if not isinstance(value, torch.Tensor) or value.is_complex():
            raise TypeError(f"{name}: {role} must be a real tensor, got {type(value).__name__}")
    if got.dtype != want.dtype or got.shape != want.shape:
        raise AssertionError(f"{name}: got {_kind(got)}, want {_kind(want)}")


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().double()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(_BITS[tensor.itemsize])


def _ordinal(tensor: torch.Tensor) -> torch.Tensor:
    """Maps floats to int64 so that neighbours differ by one: sign and magnitude to two's complement."""
    bits = tensor.detach().view(_BITS[tensor.itemsize]).long()
    magnitude = bits & ((1 << (8 * tensor.itemsize - 1)) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)


def _index_text(flat_index: int, tensor: torch.Tensor) -> str:
    return str([int(i) for i in torch.unravel_index(torch.tensor(flat_index), tensor.shape)])


def _differences(name: str, got: torch.Tensor, want: torch.Tensor, same: torch.Tensor) -> str:
    differing = (~same).flatten().nonzero().flatten()
    first = int(differing[0])
    values = [_value_text(tensor, first) for tensor in (got, want)]
    text = f"{name}: {len(differing)} of {same.numel()} elements differ ({_kind(got)}); "
    text += f"first at {_index_text(first, got)}: got {values[0]}, want {values[1]}"
    if got.dtype in _ULP_DTYPES:
        ulps = ulp_distance(got.cpu(), want.cpu()).max().item()
        text += "; one of them NaN" if ulps == _FAR else f"; at most {ulps} ulp apart"
    return text


def _value_text(tensor: torch.Tensor, flat_index: int) -> str:
    return repr(tensor.detach().cpu().reshape(-1)[flat_index].item())
