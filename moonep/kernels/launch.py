"""Launching compiled kernels without asking Triton again what it has found out before.

Triton's launch looks at every argument, makes a key of it and checks that no global has changed: more than 10 us of
Python. Then its launcher asks each tensor for its address, and the driver what kind of memory that is. Two ways around:

    launch      callers give all arguments and say what can vary; once compiled, it goes straight to Triton's launcher.
    Launch      a launch of which all is known in advance but what a call brings (`Given`). Its first run goes through
                Triton. From then on each run fills the few gaps in a list of integers, addresses included.

A `Launch` holds no tensor of a caller: what a call brings is nowhere but in the gaps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from moonep.plan import Plan

INT_MAX = 2**31 - 1

_compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}


def varying(*values: Tensor | int | None) -> tuple[Hashable, ...]:
    """What a compiled kernel depends on, of arguments that callers of this library give: see `launch`."""
    return tuple([_trait(value) for value in values])


def _trait(value: Tensor | int | None) -> Hashable:
    if value is None:
        return None
    if isinstance(value, int):
        return value > INT_MAX
    return value.dtype, value.data_ptr() & 15


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    varies: tuple[Hashable, ...] = (),
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    **constants: Any,
) -> None:
    """`kernel[grid](*args, num_warps=num_warps, num_stages=num_stages, **constants)`.

    Args:
        kernel: whose constexpr parameters come last.
        grid: one to three dimensions.
        args: tensors, descriptors and integers, in order.
        varies: `varying` of those whose dtype, alignment to 16 bytes or width is not the same in all launches with
            equal constants. Integers that Triton specialises on (1, multiples of 16) must not vary.
        num_warps, num_stages, constants: as in Triton.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
    key = (id(kernel), device, num_warps, num_stages, varies, *constants.values())
    known = _compiled.get(key)
    if known is None:
        compiled = kernel[grid](*args, num_warps=num_warps, num_stages=num_stages, **constants)
        if device >= 0 and hasattr(compiled, "packed_metadata"):
            in_order = tuple(constants[p.name] for p in kernel.params if p.name in constants)
            _compiled[key] = (compiled, in_order)
        return
    compiled, in_order = known
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *in_order)


@dataclass
class Given:
    """An argument, or a size of the grid, that each call brings.

    Attributes:
        name: of a tensor or an integer.
        seen_as: dtype that the kernel takes the tensor for; None: its own.
    """

    name: str
    seen_as: torch.dtype | None = None

    def of(self, values: Mapping[str, Any]) -> Any:
        """What Triton is given."""
        value = values[self.name]
        return value if self.seen_as is None else value.view(self.seen_as)


class Descriptor(Given):
    """A descriptor over the rows of a tensor that each call brings: see `bulk.GivenRows`."""

    def at(self, address: int, count: int) -> Any:
        """The descriptor of that many rows at an address."""
        raise NotImplementedError

    def count(self, values: Mapping[str, Any]) -> int:
        """How many rows there are."""
        raise NotImplementedError


class Address(int):
    """The address of a tensor, for those that ask for no more."""

    def data_ptr(self) -> int:
        return self


Expand = Callable[[Any], Sequence[Any]]


class Launch:
    """`kernel[grid](*args, num_warps=num_warps, **constants)`, where each call brings what is `Given`.

    Args:
        kernel: whose constexpr parameters come last.
        grid: one to three dimensions. Nothing is launched if the first is 0.
        args: tensors, descriptors, integers and `Given`, in order.
        num_warps, constants: as in Triton. `EARLY` among them: see `start_early`.

    Attributes:
        ready: whether Triton has compiled it for a GPU, so that it can be repeated.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int | Given, ...], args: Sequence[Any], *, num_warps: int = 4, **constants: Any
    ):
        self.kernel, self.grid, self.args, self.num_warps, self.constants = kernel, grid, args, num_warps, constants
        self.ready = False

    def start_early(self) -> None:
        """Launch it while the kernel before still runs, if it is made for that: `moonep.kernels.early`."""
        if "EARLY" in self.constants:
            self.constants["EARLY"] = True

    def run(self, values: Mapping[str, Any]) -> None:
        """Launch through Triton. values: tensors, and integers that the kernel does not specialise on."""
        grid = tuple(n.of(values) if isinstance(n, Given) else n for n in self.grid)
        if grid[0] == 0:
            return
        args = [arg.of(values) if isinstance(arg, Given) else arg for arg in self.args]
        early = {"launch_pdl": True} if self.constants.get("EARLY") else {}
        compiled = self.kernel[grid](*args, num_warps=self.num_warps, **early, **self.constants)
        if not self.ready and hasattr(compiled, "packed_metadata"):  # neither interpreted nor recorded
            self._prepare(compiled, args)

    def _prepare(self, compiled: Any, args: Sequence[Any]) -> None:
        """Write down what Triton's launcher takes after grid and stream, and where the gaps for what is given are."""
        self._compiled = compiled  # owns the function
        self._call, head, expand = open_launcher(compiled, sum(hasattr(value, "block_shape") for value in args))
        self._grid = (*self.grid, 1, 1)[:3]
        self._written: list[Any] = [*head]
        self._gaps: list[tuple[int, str]] = []
        self._descriptors: list[tuple[slice, Descriptor, Callable[[int, int], Sequence[Any]]]] = []
        for parameter, arg, value in zip(self.kernel.params, self.args, args, strict=False):
            begin = len(self._written)
            if hasattr(value, "block_shape"):
                self._written += expand[0](value)
                if isinstance(arg, Descriptor):
                    self._descriptors.append((slice(begin, len(self._written)), arg, _encoder(arg, expand[0])))
                expand = expand[1:]
                continue
            self._written.append(value.data_ptr() if isinstance(value, Tensor) else value)
            if isinstance(arg, Given):
                assert isinstance(value, Tensor) or parameter.do_not_specialize, f"{parameter.name} is specialised on"
                self._gaps.append((begin, arg.name))
        self._written += [self.constants[p.name] for p in self.kernel.params if p.name in self.constants]
        self.ready = True

    def repeat(self, stream: int, values: Mapping[str, Any]) -> None:
        """Launch without Triton.

        Args:
            stream: the address of a stream of the device that it was compiled for.
            values: integers, and addresses of tensors; dtypes and what is left of the addresses modulo 16 must be
                as in the `run` that compiled it.
        """
        written = self._written.copy()
        for at, name in self._gaps:
            written[at] = values[name]
        for part, descriptor, encode in self._descriptors:
            written[part] = encode(values[descriptor.name], descriptor.count(values))
        x, y, z = self._grid
        self._call(values[x.name] if isinstance(x, Given) else x, y, z, stream, *written)


def _encoder(descriptor: Descriptor, expand: Expand) -> Callable[[int, int], Sequence[Any]]:
    """(address, rows) -> what a descriptor is expanded to. It depends on nothing else, so the last ones are kept."""
    return lru_cache(maxsize=64)(lambda address, count: expand(descriptor.at(address, count)))


class Launches:
    """Launches that follow each other, made for each kind of call when the first of that kind comes.

    Calls are of one kind if they have the same options, and bring tensors of the same dtypes, at addresses that are the
    same modulo 16: all that Triton compiles apart.

    Args:
        make: a method, options -> the launches. Its object, which owns this one, is not kept alive: memory goes back
            with the last reference to a Buffer, not when Python looks for cycles.
        device: of the tensors.
        early: launch those early that are made for it.
    """

    def __init__(self, make: Callable[..., Sequence[Launch]], device: torch.device, early: bool = False):
        self._make, self._device, self._early = WeakMethod(make), device.index, early
        self._made: dict[Hashable, Sequence[Launch]] = {}
        self._ready: dict[Hashable, Sequence[Launch]] = {}

    def run(self, options: tuple[Hashable, ...], given: Mapping[str, Any], plan: Plan | None = None) -> None:
        """Enqueue them on the current stream, whose device must be the current one.

        Args:
            options: for `make`.
            given: by name; None, where these options do not need it.
            plan: whose tensors are given, too.
        """
        values: dict[str, Any] = {} if plan is None else plan.addresses
        traits: list[Hashable] = [options]
        for name, value in given.items():
            if isinstance(value, Tensor):
                address = values[name] = value.data_ptr()
                traits += (name, value.dtype, address & 15)
            else:
                values[name] = value
        kind = tuple(traits)
        if (ready := self._ready.get(kind)) is not None:
            stream = torch._C._cuda_getCurrentRawStream(self._device)
            for launch in ready:
                launch.repeat(stream, values)
            return
        made = self._made.get(kind)
        if made is None:
            make = self._make()
            assert make is not None, "its owner is gone"
            made = self._made[kind] = make(*options)
            for launch in made if self._early else ():
                launch.start_early()
        tensors = given if plan is None else {**given, **plan.views}
        for launch in made:
            launch.run(tensors)
        if all(launch.ready for launch in made):
            self._ready[kind] = made


def open_launcher(compiled: Any, descriptors: int) -> tuple[Callable[..., None], tuple[Any, ...], list[Expand]]:
    """How to launch a compiled kernel: call(x, y, z, stream, *head, *args).

    Integers stand for pointers as well as tensors do. This is the C function inside of Triton's launcher if that is
    built as in Triton 3.6, else the launcher, which comes to the same by way of more Python.

    Args:
        compiled: by Triton.
        descriptors: how many there are among its arguments.

    Returns:
        call; head; for each descriptor, what expands it to arguments.
    """
    launcher = compiled.run
    try:
        from triton.backends.nvidia import driver

        metas = getattr(compiled.metadata, "tensordesc_meta", None) or [None] * descriptors
        as_known = driver._BASE_ARGS_FORMAT == "iiiKKppOOOOOO" and type(launcher) is driver.CudaLauncher
        without_scratch = as_known and launcher.global_scratch_size == launcher.profile_scratch_size == 0
        if without_scratch and len(metas) == descriptors:
            call, flags = launcher.launch, (launcher.launch_cooperative_grid, launcher.launch_pdl)
            if descriptors:
                call = inspect.getclosurevars(call).nonlocals["launcher"]
            expand: list[Expand] = [partial(driver.make_tensordesc_arg, metadata=meta) for meta in metas]
            return call, (compiled.function, *flags, None, None, compiled.packed_metadata, None, None, None), expand
    except (AttributeError, ImportError, KeyError, TypeError):
        pass
    return launcher, (compiled.function, compiled.packed_metadata, None, None, None), [_as_it_is] * descriptors


def _as_it_is(descriptor: Any) -> list[Any]:
    return [descriptor]
