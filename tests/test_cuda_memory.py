"""What can be said of the CUDA memory without a GPU: how it is asked for, and how long a tensor keeps it."""

from __future__ import annotations

import ctypes
import gc
import weakref

import pytest
import torch

from moonep.memory.cuda import access_descriptor, allocation_properties, bytes_tensor, driver


class Owner:
    """Stands in for a mapping: memory of the host."""

    def __init__(self, nbytes: int):
        self.array = (ctypes.c_uint8 * nbytes)()
        self.address = ctypes.addressof(self.array)


def test_the_last_view_of_a_mapping_lets_go_of_it():
    owner = Owner(4096)
    gone = weakref.ref(owner)
    tensor = bytes_tensor(owner.address, 4096, torch.device("cpu"), owner)
    view = tensor.view(torch.bfloat16)[8:16]
    view.fill_(3)
    assert bytes(owner.array[16:18]) == b"\x40\x40" and tensor.data_ptr() == owner.address
    del owner, tensor
    gc.collect()
    assert gone() is not None and (view == 3).all()
    del view
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("fabric", [False, True])
def test_chunks_are_plain_allocations_of_one_device_that_can_be_exported(fabric):
    types = driver().CUmemAllocationHandleType
    properties = allocation_properties(3, fabric)
    handle = types.CU_MEM_HANDLE_TYPE_FABRIC if fabric else types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    assert properties.type == driver().CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    assert properties.location.type == driver().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    assert (properties.location.id, properties.requestedHandleTypes) == (3, handle)


def test_only_the_own_device_gets_access():
    access = access_descriptor(2)
    assert access.location.id == 2
    assert access.flags == driver().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
