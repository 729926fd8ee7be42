"""Compiling kernels without a GPU: launches are recorded, not run, and what they would compile is compiled.

    with record_launches() as launches:
        backend.dispatch(...)               # on tensors of the host: nothing runs
    for launch in launches:
        compiled = launch.compile(90)       # for sm_90: compiled.asm["ptx"], compiled.asm["cubin"]

So the signatures that are tested are those of the launchers, and no list of kernels has to be kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moonep.backends.gpu import GpuBackend
from moonep.dims import Dims
from moonep.memory.host import HostChunk, HostMemory

POINTERS = {
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
}


@dataclass(frozen=True)
class Launch:
    """One kernel launch: the kernel, the types of its arguments, its constants and options, whether it starts early."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[int, ...]
    num_warps: int
    num_stages: int
    early: bool

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    def compile(self, arch: int) -> Any:
        """Compile for compute capability `arch` (80, 90, 100)."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        source = (GluonASTSource if self.kernel.is_gluon() else ASTSource)(
            fn=self.kernel,
            signature=self.signature,
            constexprs=self.constants,
            attrs={(i,): [["tt.divisibility", 16]] for i in self.divisible},
        )
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Inside, kernels are not run; what would be launched is appended to the list, equal launches once."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    run = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = _describe(self, args, kwargs)
        if launch not in launches:
            launches.append(launch)

    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run


def _describe(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    num_warps, num_stages = values.pop("num_warps", 4), values.pop("num_stages", 3)
    early = values.pop("launch_pdl", False)
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisible = []
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif hasattr(value, "block_shape"):  # a tensor descriptor
            element = POINTERS[value.base.dtype].removeprefix("*")
            layout = f",{value.layout!r}" if hasattr(value, "layout") else ""  # Gluon says it, Triton finds one
            signature[parameter.name] = f"tensordesc<{element}{list(value.block_shape)}{layout}>"
        elif isinstance(value, Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            if value.data_ptr() % 16 == 0:
                divisible.append(i)
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if not parameter.do_not_specialize and value % 16 == 0:
                divisible.append(i)
    return Launch(kernel, signature, constants, tuple(divisible), num_warps, num_stages, early)


class OneProcessMemory(HostMemory):
    """Memory of the host in which one process plays all ranks: `share` makes every rank's chunk here."""

    def share(self, sizes: Any, peers: Any, operation: str, timeout_s: float) -> list[list[HostChunk]]:
        """Chunks of all ranks, all of this process."""
        return [[HostChunk(n) for _ in range(peers.size)] for n in sizes]


def fake_backend(
    dims: Dims, dtype: torch.dtype, rank: int = 0, num_sms: int = 132, movers: str = "portable", early: bool = False
) -> GpuBackend:
    """A GPU backend of one rank whose peers do not exist, on memory of the host.

    early: as if for a GPU that launches kernels early.
    """
    nothing = {"all_gather": lambda *_, **__: [b""] * dims.R, "leave_note": lambda *_: None}
    peers: Any = SimpleNamespace(rank=rank, size=dims.R, exchanges=0, **nothing)
    return GpuBackend(dims, dtype, peers, 60.0, OneProcessMemory(), num_sms, None, 0, early, movers)


def negated_in_minima_of_three(ptx: str) -> list[str]:
    """Registers that a `neg` writes and one of two chained `min` or `max` reads.

    ptxas of CUDA 12.8 drops the sign of a negated operand when it fuses minima into one of three (VIMNMX3, sm_90): seen
    on an H200 as wrong plans for R > 64. Kernels must not have this; `~x`, or a maximum, does instead of `-x`.
    """
    negated = set(re.findall(r"neg\.s32\s+(%r\d+),", ptx))
    extrema = re.findall(r"(?:min|max)\.s32\s+(%r\d+), (%r\d+), (%r\d+);", ptx)
    results, operands = {x[0] for x in extrema}, {r for x in extrema for r in x[1:]}
    chained = [x for x in extrema if x[0] in operands or results & set(x[1:])]
    return sorted(negated & {r for x in chained for r in x[1:]})
