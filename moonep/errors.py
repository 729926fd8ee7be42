"""What MoonEP raises besides ValueError: a peer that failed, a peer that did not come, slots of another plan."""

from __future__ import annotations

from typing import NoReturn


class PeerError(RuntimeError):
    """Another rank failed in an operation that this rank takes part in.

    Attributes:
        rank: the rank (within the EP group) that failed.
        peer: the same.
        operation: the operation that this rank was in.
        message: what the other rank did, without rank and operation.
    """

    def __init__(self, rank: int, operation: str, message: str):
        super().__init__(f"{operation}: rank {rank}: {message}")
        self.rank = self.peer = rank
        self.operation, self.message = operation, message

    def again(self) -> PeerError:
        """The same error to be raised again: without traceback, which would keep alive what it passed through."""
        kind, arguments = self.__reduce__()
        return kind(*arguments)

    def __reduce__(self) -> tuple:
        return type(self), (self.rank, self.operation, self.message)


class PeerTimeout(PeerError):
    """Another rank did not arrive within the time limit: it is dead, stuck, or far behind.

    Attributes:
        rank, peer: the rank (within the EP group) that did not arrive.
        operation, message: see `PeerError`.
        waiting_rank: this rank, which waited for it; None: not known.
        waited_s: seconds that it waited; None: not known.
    """

    def __init__(
        self, rank: int, operation: str, message: str, waiting_rank: int | None = None, waited_s: float | None = None
    ):
        super().__init__(rank, operation, message)
        self.waiting_rank, self.waited_s = waiting_rank, waited_s

    def __reduce__(self) -> tuple:
        return type(self), (self.rank, self.operation, self.message, self.waiting_rank, self.waited_s)


class StaleSlotsError(RuntimeError):
    """The slots for redundant experts hold the weights of another plan: prefetch again before the experts run."""


class NotCopied:
    """Base of what has memory in common with other ranks: copying or pickling it is a TypeError."""

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: cannot be copied or pickled, its memory is shared with other ranks; for a copy "
            "make another layer on every rank and load_state_dict into it; for a checkpoint save "
            "moonep.nn.sharded_state(model)"
        )
