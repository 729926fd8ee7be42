"""GPU kernels in Triton. One operation, one file: kernel, then launcher.

Every kernel also runs in Triton's interpreter on memory of the host, so that the same code is tested without a GPU.
What all kernels share:

* A region of all ranks is addressed as `base + rank * stride`: the tensor of rank 0 and the elements to the next rank.
* `status`: int32 on this device; once a barrier has failed it is not zero, and every later kernel does nothing.
* Data kernels never wait for another rank: waiting is the barrier's (`barrier`).
* `INTERPRET`: some things differ in the interpreter, which has no timer and rounds otherwise (`rounding`).
* Loops over data are `while` loops: the interpreter with recent numpy cannot iterate `range` over tensors.
"""
