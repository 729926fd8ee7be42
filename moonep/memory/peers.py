"""Peers: the ranks of one process group, and how they exchange bytes and file descriptors while memory is set up.

Bytes travel through the store of torch.distributed: it needs no device, no numpy, has a time limit, and tells who is
missing. File descriptors travel by SCM_RIGHTS over unix sockets without a file name: no privilege, nothing to clean up.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
import uuid
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from moonep.errors import PeerError, PeerTimeout

_MAX_DESCRIPTORS_PER_MESSAGE = 250


class Peers:
    """This rank's view of a process group.

    Attributes:
        rank, size: this rank and the number of ranks within the group.
        updates: counts the moments at which a peer may have changed its weights (a dispatch, a barrier, a
            parameter update): slots copied at an earlier count may be out of date.
        exchanges: how many exchanges there were so far: equal on all ranks.
        shared: objects that live as long as someone on this rank uses them (the slots that pools share).
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.updates = 0
        self.shared: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        self.exchanges = 0

    @staticmethod
    def of(group: dist.ProcessGroup | None, num_ranks: int | None = None) -> Peers:
        """The Peers of a group, one object a group; None means all ranks, or this process alone when there are none.

        Raises:
            ValueError: `num_ranks` is given and the group has another size.
        """
        if group is None and dist.is_available() and dist.is_initialized() and num_ranks != 1:
            group = dist.group.WORLD
        if group is None:
            peers = _alone
        else:
            if dist.get_rank(group) < 0:
                raise ValueError("group: given a process group without this rank, expected one that contains it")
            peers = _by_group.setdefault(group, Peers(group))
        if num_ranks is not None and num_ranks != peers.size:
            given = f"a group of {peers.size}" if group else "no process group (is torch.distributed initialised?)"
            raise ValueError(f"num_ep_ranks: given {num_ranks} with {given}, expected the size of the group")
        return peers

    def all_gather(self, payload: bytes, operation: str, timeout_s: float) -> list[bytes]:
        """Every rank's payload, in rank order.

        Raises:
            PeerTimeout: a rank sent nothing within the limit.
        """
        self.exchanges += 1
        if self.size == 1:
            return [payload]
        store = dist.distributed_c10d._get_default_store()
        prefix = f"moonep/{self.group.group_name}/{self.exchanges}"  # type: ignore[union-attr]
        store.set(f"{prefix}/{self.rank}", payload)  # type: ignore[arg-type]
        deadline = time.monotonic() + timeout_s
        gathered = []
        for r in range(self.size):
            key = f"{prefix}/{r}"
            try:
                store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except RuntimeError as error:
                raise PeerTimeout(r, operation, f"did not arrive within {timeout_s:g} s") from error
            gathered.append(store.get(key))
        if store.add(f"{prefix}/read", 1) == self.size:
            for name in [*range(self.size), "read"]:
                store.delete_key(f"{prefix}/{name}")
        return gathered

    def agree(self, operation: str, timeout_s: float, check: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Run `check` on every rank and compare what it returns; fail on every rank when it fails on one.

        Args:
            check: validates this rank's arguments; returns what must be equal on all ranks. Keys starting with "_"
                are exchanged but may differ.

        Returns:
            What each rank's `check` returned.

        Raises:
            ValueError: `check` raised it here, or the values of a key differ between ranks.
            PeerError: `check` raised on another rank.
            PeerTimeout: a rank did not call within the limit.
        """
        mine: dict[str, Any] = {}
        problem: ValueError | None = None
        try:
            mine = check()
        except ValueError as error:
            problem = error
        message = {"values": mine, "error": None if problem is None else str(problem)}
        replies = [json.loads(r) for r in self.all_gather(json.dumps(message).encode(), operation, timeout_s)]
        if problem is not None:
            raise problem
        for r, reply in enumerate(replies):
            if reply["error"] is not None:
                raise PeerError(r, operation, reply["error"])
        values = [reply["values"] for reply in replies]
        for key in values[0]:
            if not key.startswith("_") and any(v.get(key) != values[0][key] for v in values):
                given = ", ".join(f"rank {r}: {v.get(key)!r}" for r, v in enumerate(values))
                raise ValueError(f"{key}: given {given}, expected the same on every rank")
        return values

    def exchange_descriptors(self, descriptors: list[int], operation: str, timeout_s: float) -> list[list[int]]:
        """Every rank's file descriptors, valid here, in rank order. The caller closes them; its own are duplicates.

        Raises:
            PeerTimeout: a rank did not connect within the limit.
        """
        own = [os.dup(fd) for fd in descriptors]
        if self.size == 1:
            return [own]
        deadline = time.monotonic() + timeout_s
        received: dict[int, list[int]] = {self.rank: own}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            name = f"moonep-{uuid.uuid4().hex}"
            server.bind("\0" + name)
            server.listen(self.size)
            names = self.all_gather(name.encode(), operation, timeout_s)
            outgoing = [_send(names[r], self.rank, descriptors) for r in range(self.size) if r != self.rank]
            try:
                while len(received) < self.size:
                    server.settimeout(max(deadline - time.monotonic(), 0.001))
                    try:
                        connection, _ = server.accept()
                    except TimeoutError as error:
                        missing = next(r for r in range(self.size) if r not in received)
                        raise PeerTimeout(missing, operation, f"sent no memory within {timeout_s:g} s") from error
                    with connection:
                        if _uid_of(connection) != os.getuid():
                            continue
                        connection.settimeout(timeout_s)
                        rank, fds = _receive(connection, len(descriptors))
                        received[rank] = fds
            finally:
                for connection in outgoing:
                    connection.close()
        return [received[r] for r in range(self.size)]


_alone = Peers(None)
_by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, Peers] = weakref.WeakKeyDictionary()


def _send(name: bytes, rank: int, descriptors: list[int]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(b"\0" + name)
    connection.sendall(struct.pack("<i", rank))
    for i in range(0, len(descriptors), _MAX_DESCRIPTORS_PER_MESSAGE):
        socket.send_fds(connection, [b"."], descriptors[i : i + _MAX_DESCRIPTORS_PER_MESSAGE])
    return connection


def _receive(connection: socket.socket, count: int) -> tuple[int, list[int]]:
    (rank,) = struct.unpack("<i", connection.recv(4, socket.MSG_WAITALL))
    fds: list[int] = []
    while len(fds) < count:
        data, more, _, _ = socket.recv_fds(connection, 1, _MAX_DESCRIPTORS_PER_MESSAGE)
        if not data:
            raise PeerError(rank, "exchange_descriptors", "closed the connection before it had sent its memory")
        fds += more
    return rank, fds


def _uid_of(connection: socket.socket) -> int:
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return uid
