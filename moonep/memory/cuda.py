"""Symmetric memory on CUDA: virtual memory management through `cuda.bindings.driver`, and nothing else.

A chunk is an allocation on one GPU; its handle goes to the other ranks as a file descriptor (one host) or as a fabric
handle (several hosts with one NVLink domain); every rank maps the chunks of all ranks side by side into one address
range. No multicast objects, no managed memory, no peer context: a rank may see only its own GPU.

A tensor over a mapping keeps it alive (a DLPack deleter), and a mapping keeps the physical memory alive, whoever
created it: memory goes back to the driver when no rank maps it any more.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from moonep import environment
from moonep.dims import align_up
from moonep.memory.peers import Peers
from moonep.memory.strides import dense_strides

FABRIC_HANDLE_BYTES = 64


def driver() -> Any:
    """`cuda.bindings.driver`, imported when first needed."""
    try:
        from cuda.bindings import driver as module
    except ImportError as error:
        raise RuntimeError('the cuda backend needs cuda-bindings: pip install "moonep[gpu]"') from error
    return module


def call(name: str, *args: Any) -> Any:
    """Call a driver function; its results, or a RuntimeError that names function and error."""
    status, *results = getattr(driver(), name)(*args)
    if int(status) != 0:
        raise RuntimeError(f"{name}: {status.name}")
    return results[0] if len(results) == 1 else tuple(results)


def allocation_properties(device_index: int, fabric: bool = False) -> Any:
    """What kind of memory a chunk is: on one device, with a handle that can be exported."""
    drv = driver()
    types = drv.CUmemAllocationHandleType
    properties = drv.CUmemAllocationProp()
    properties.type = drv.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = drv.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device_index
    properties.requestedHandleTypes = (
        types.CU_MEM_HANDLE_TYPE_FABRIC if fabric else types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    )
    return properties


def access_descriptor(device_index: int) -> Any:
    """Read and write access from one device."""
    drv = driver()
    access = drv.CUmemAccessDesc()
    access.location.type = drv.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device_index
    access.flags = drv.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


class CudaChunk:
    """A piece of memory on some rank's GPU, known here by a driver handle."""

    def __init__(self, handle: Any, nbytes: int):
        self.handle, self.nbytes = handle, nbytes
        self._release = weakref.finalize(self, call, "cuMemRelease", handle)
        self._release.atexit = False

    def close(self) -> None:
        """Give the handle back. Mappings stay."""
        self._release()


class CudaMapping:
    """Chunks side by side in one address range; unmapped when the last tensor over it is gone.

    Args:
        chunks: what to map; a chunk may occur several times, always whole.
        device: whose kernels may use it.
        granule: alignment of the range.
    """

    def __init__(self, chunks: Sequence[CudaChunk], device: torch.device, granule: int):
        self.device = device
        self.nbytes = sum(c.nbytes for c in chunks)
        self.address = int(call("cuMemAddressReserve", self.nbytes, granule, 0, 0))
        mapped: list[tuple[int, int]] = []
        self._unmap = weakref.finalize(self, _unmap, device, self.address, self.nbytes, mapped)
        self._unmap.atexit = False
        at = self.address
        for chunk in chunks:
            call("cuMemMap", at, chunk.nbytes, 0, chunk.handle, 0)
            mapped.append((at, chunk.nbytes))
            at += chunk.nbytes
        call("cuMemSetAccess", self.address, self.nbytes, [access_descriptor(device.index)], 1)

    def tensor(
        self, shape: Sequence[int], dtype: torch.dtype, offset: int = 0, row_stride_bytes: int | None = None
    ) -> Tensor:
        """A tensor at a byte offset: dense rows, dim 0 `row_stride_bytes` apart (None: dense as a whole)."""
        flat = bytes_tensor(self.address, self.nbytes, self.device, self).view(dtype)
        return flat.as_strided(shape, dense_strides(shape, dtype, row_stride_bytes), offset // dtype.itemsize)


def _unmap(device: torch.device, address: int, nbytes: int, mapped: list[tuple[int, int]]) -> None:
    torch.cuda.synchronize(device)  # a kernel that was given the memory may still run
    for at, size in mapped:
        call("cuMemUnmap", at, size)
    call("cuMemAddressFree", address, nbytes)


class CudaMemory:
    """Makes, shares and maps memory of this rank's GPU. New memory is undefined.

    Args:
        device: this rank's GPU.
        handles: "fd", "fabric", or None: fabric if the ranks are on several hosts, else file descriptors.
    """

    zeroed = False

    def __init__(self, device: torch.device, handles: str | None = None):
        self.device = device
        self.handles = handles
        torch.zeros(1, device=device)  # the driver calls need torch's context

    @cached_property
    def granule(self) -> int:
        """Bytes that a chunk's size and a mapping's alignment are multiples of."""
        flag = driver().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(call("cuMemGetAllocationGranularity", allocation_properties(self.device.index), flag))

    def allocate(self, nbytes: int, fabric: bool = False) -> CudaChunk:
        """A chunk of this rank, rounded up to granules."""
        nbytes = align_up(max(nbytes, 1), self.granule)
        return CudaChunk(call("cuMemCreate", nbytes, allocation_properties(self.device.index, fabric), 0), nbytes)

    def share(self, sizes: Sequence[int], peers: Peers, operation: str, timeout_s: float) -> list[list[CudaChunk]]:
        """Create chunks on every rank and exchange them, all in one go. Collective. See `HostMemory.share`."""
        fabric = self._use_fabric(peers, operation, timeout_s)
        own = [self.allocate(n, fabric) for n in sizes]
        exchange = self._exchange_fabric if fabric else self._exchange_descriptors
        theirs = exchange(own, peers, operation, timeout_s)
        return [
            [own[i] if r == peers.rank else CudaChunk(theirs[r][i], own[i].nbytes) for r in range(peers.size)]
            for i in range(len(sizes))
        ]

    def map(self, chunks: Sequence[CudaChunk]) -> CudaMapping:
        """Map chunks side by side. A driver maps whole allocations only."""
        return CudaMapping(chunks, self.device, self.granule)

    def _use_fabric(self, peers: Peers, operation: str, timeout_s: float) -> bool:
        if peers.size == 1:
            return False
        choice = self.handles or environment.handles()
        if choice not in (None, "fd", "fabric"):
            raise ValueError(f"MOONEP_HANDLES: given {choice!r}, expected 'fd' or 'fabric'")
        hosts = set(peers.all_gather(host_name(), operation, timeout_s, "hosts"))
        return choice == "fabric" or (not choice and len(hosts) > 1)

    def _exchange_descriptors(
        self, own: list[CudaChunk], peers: Peers, operation: str, timeout_s: float
    ) -> list[list[Any]]:
        kind = driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        exported = [int(call("cuMemExportToShareableHandle", c.handle, kind, 0)) for c in own]
        received: list[list[int]] = []
        try:
            received = peers.exchange_descriptors(exported, operation, timeout_s)
            handles: list[list[Any]] = []
            for r, descriptors in enumerate(received):
                mine = r == peers.rank
                handles.append([] if mine else [call("cuMemImportFromShareableHandle", fd, kind) for fd in descriptors])
        finally:
            for fd in [*exported, *(fd for descriptors in received for fd in descriptors)]:
                os.close(fd)
        return handles

    def _exchange_fabric(self, own: list[CudaChunk], peers: Peers, operation: str, timeout_s: float) -> list[list[Any]]:
        kind = driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
        exported = [bytes(call("cuMemExportToShareableHandle", c.handle, kind, 0).data) for c in own]
        received = peers.all_gather(b"".join(exported), operation, timeout_s, "handles")
        handles: list[list[Any]] = []
        for r, joined in enumerate(received):
            pieces = [joined[i : i + FABRIC_HANDLE_BYTES] for i in range(0, len(joined), FABRIC_HANDLE_BYTES)]
            mine = r == peers.rank
            handles.append([] if mine else [call("cuMemImportFromShareableHandle", p, kind) for p in pieces])
        return handles


def host_name() -> bytes:
    """Equal for processes of one host."""
    return os.uname().nodename.encode()


class _DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int), ("device_id", ctypes.c_int)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = [("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _Deleter)]

_DL_CPU, _DL_CUDA, _DL_UINT = 1, 2, 1
_alive: dict[int, tuple[Any, ...]] = {}


def bytes_tensor(address: int, nbytes: int, device: torch.device, owner: object) -> Tensor:
    """[nbytes] uint8 over memory that `owner` owns: the last tensor over it lets go of the owner.

    The device is stated, not looked up: the first byte of a stitched range may lie on another rank's GPU.
    """
    managed, shape = _DLManagedTensor(), (ctypes.c_int64 * 1)(nbytes)
    key = ctypes.addressof(managed)
    deleter = _Deleter(_forget(key))
    kind = _DL_CUDA if device.type == "cuda" else _DL_CPU
    managed.dl_tensor = _DLTensor(address, _DLDevice(kind, device.index or 0), 1, _DLDataType(_DL_UINT, 8, 1), shape)
    managed.deleter = deleter
    _alive[key] = (managed, shape, deleter, owner)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return torch.utils.dlpack.from_dlpack(new_capsule(key, b"dltensor", None))


def _forget(key: int) -> Callable[[object], None]:
    def forget(_: object) -> None:
        if not sys.is_finalizing():
            _alive.pop(key, None)

    return forget
