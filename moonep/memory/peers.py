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
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from moonep.arguments import check_seconds, describe
from moonep.errors import PeerError, PeerTimeout

_MAX_DESCRIPTORS_PER_MESSAGE = 250
_MAX_NOTE = 1024
_NOTE_S = 0.5
_DEFAULT_TIMEOUT_S = 60.0  # while a rank tells its peers that it was given a wrong one


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
        self._group = None if group is None else weakref.ref(group)
        self.name = "" if group is None else group.group_name
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.updates = 0
        self.shared: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        self.exchanges = 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None: this process alone. Held weakly: it goes when its users let go of it.

        Raises:
            ValueError: it has gone.
        """
        if self._group is None:
            return None
        if (group := self._group()) is None:
            raise ValueError(f"group: given {self.name!r}, which destroy_process_group has ended, expected a live one")
        return group

    @staticmethod
    def of(group: dist.ProcessGroup | None, alone: bool = False) -> Peers:
        """The Peers of a group, one object a group.

        Args:
            group: None: all ranks, or this process alone when there are none.
            alone: None means this process alone in any case.

        Raises:
            ValueError: no process group, or one without this rank. Who its peers are is not known, so none is told.
        """
        if group is None and dist.is_available() and dist.is_initialized() and not alone:
            group = dist.group.WORLD
        if group is None:
            return _alone
        try:
            rank = dist.get_rank(group)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"group: given {describe(group)}, expected None or a live process group") from error
        if rank < 0:
            raise ValueError("group: given a process group without this rank, expected one that contains it")
        if group not in _by_group:
            _by_group[group] = Peers(group)
        return _by_group[group]

    def all_gather(self, payload: bytes, operation: str, timeout_s: float, step: str = "") -> list[bytes]:
        """Every rank's payload, in rank order.

        Args:
            payload: of this rank.
            operation: what the exchange is part of, for messages.
            timeout_s: seconds to wait.
            step: what is exchanged: ranks that are in different steps do not take the one's payload for the other's.

        Raises:
            PeerTimeout: a rank sent nothing within the limit.
        """
        self.exchanges += 1
        if self.size == 1:
            return [payload]
        store = dist.distributed_c10d._get_default_store()
        prefix = f"moonep/{self.name}/{self.exchanges}/{operation}/{step}"
        store.set(f"{prefix}/{self.rank}", payload)  # type: ignore[arg-type]
        deadline = time.monotonic() + timeout_s
        gathered = []
        for r in range(self.size):
            key = f"{prefix}/{r}"
            try:
                store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except RuntimeError as error:
                raise self._timeout(r, operation, "did not arrive", timeout_s) from error
            gathered.append(store.get(key))
        if store.add(f"{prefix}/read", 1) == self.size:
            for name in [*range(self.size), "read"]:
                store.delete_key(f"{prefix}/{name}")
        return gathered

    def agree(self, operation: str, timeout_s: float, check: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Run `check` on every rank and compare what it returns; fail on every rank when it fails on one.

        Args:
            operation: what is agreed on, for messages.
            timeout_s: seconds to wait; checked as `check` is.
            check: validates this rank's arguments; returns what must be equal on all ranks. Keys starting with "_"
                are exchanged but may differ.

        Returns:
            What each rank's `check` returned.

        Raises:
            ValueError: `check` raised it here (or whatever else it raised), or values of a key differ between ranks.
            PeerError: `check` raised on another rank.
            PeerTimeout: a rank did not call within the limit.
        """
        wait_s, problem = _DEFAULT_TIMEOUT_S, None
        try:
            check_seconds("timeout_s", timeout_s)
            wait_s = timeout_s
            message = json.dumps({"values": check(), "error": None})
        except Exception as error:
            problem = error
            message = json.dumps({"values": {}, "error": str(error)})
        replies = [json.loads(r) for r in self.all_gather(message.encode(), operation, wait_s, "arguments")]
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

    def leave_note(self, subject: str, text: str) -> None:
        """Write down for the others why this rank failed; a later note of this rank replaces it. Never raises."""
        if self.size > 1:
            with suppress(RuntimeError, ValueError):  # the store or the group may be gone
                store, key = dist.distributed_c10d._get_default_store(), self._note_key(subject, self.rank)
                store.set(key, text[:_MAX_NOTE])
                store.wait([key], timedelta(seconds=_NOTE_S))  # answered after `set` has been done

    def read_note(self, subject: str, rank: int) -> str:
        """What a rank has written down, which it may be about to do; "" if it does not. Never raises."""
        note = b""
        if self.size > 1:
            with suppress(RuntimeError, ValueError):
                store, key = dist.distributed_c10d._get_default_store(), self._note_key(subject, rank)
                store.wait([key], timedelta(seconds=_NOTE_S))
                note = store.get(key)
        return note.decode(errors="replace")

    def _note_key(self, subject: str, rank: int) -> str:
        return f"moonep/{self.name}/{subject}/{rank}"

    def _timeout(self, peer: int, operation: str, what: str, waited_s: float) -> PeerTimeout:
        text = f"{what} within {waited_s:g} s; rank {self.rank} waited"
        return PeerTimeout(peer, operation, text, self.rank, waited_s)

    def exchange_descriptors(self, descriptors: list[int], operation: str, timeout_s: float) -> list[list[int]]:
        """Every rank's file descriptors, valid here, in rank order. The caller closes them; its own are duplicates.

        Raises:
            PeerTimeout: a rank did not connect within the limit.
        """
        received: dict[int, list[int]] = {self.rank: [os.dup(fd) for fd in descriptors]}
        try:
            if self.size > 1:
                self._receive_descriptors(descriptors, received, operation, timeout_s)
        except BaseException:
            for fd in (fd for fds in received.values() for fd in fds):
                os.close(fd)
            raise
        return [received[r] for r in range(self.size)]

    def _receive_descriptors(
        self, descriptors: list[int], received: dict[int, list[int]], operation: str, timeout_s: float
    ) -> None:
        deadline = time.monotonic() + timeout_s
        with ExitStack() as connections, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            name = f"moonep-{uuid.uuid4().hex}"
            server.bind("\0" + name)
            server.listen(self.size)
            names = self.all_gather(name.encode(), operation, timeout_s, "sockets")
            for r in range(self.size):
                if r != self.rank:
                    outgoing = connections.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                    try:
                        _send(outgoing, names[r], self.rank, descriptors)
                    except OSError as error:
                        raise PeerError(r, operation, f"does not take memory: {error}") from error
            while len(received) < self.size:
                server.settimeout(max(deadline - time.monotonic(), 0.001))
                try:
                    connection, _ = server.accept()
                    with connection:
                        connection.settimeout(max(deadline - time.monotonic(), 0.001))
                        _receive(connection, len(descriptors), received)
                except TimeoutError as error:
                    missing = next(r for r in range(self.size) if len(received.get(r, [])) < len(descriptors))
                    raise self._timeout(missing, operation, "sent no memory", timeout_s) from error
            for r, fds in received.items():
                if len(fds) < len(descriptors):
                    raise PeerError(r, operation, "ended before it had sent its memory")


_alone = Peers(None)
_by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, Peers] = weakref.WeakKeyDictionary()


def _send(connection: socket.socket, name: bytes, rank: int, descriptors: list[int]) -> None:
    connection.connect(b"\0" + name)
    connection.sendall(struct.pack("<i", rank))
    for i in range(0, len(descriptors), _MAX_DESCRIPTORS_PER_MESSAGE):
        socket.send_fds(connection, [b"."], descriptors[i : i + _MAX_DESCRIPTORS_PER_MESSAGE])


def _receive(connection: socket.socket, count: int, received: dict[int, list[int]]) -> None:
    """Take a peer's descriptors. One that hangs up has sent fewer; a stranger is ignored."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    greeting = connection.recv(4, socket.MSG_WAITALL)
    if uid != os.getuid() or len(greeting) < 4:
        return
    fds = received.setdefault(struct.unpack("<i", greeting)[0], [])
    while len(fds) < count:
        data, more, _, _ = socket.recv_fds(connection, 1, _MAX_DESCRIPTORS_PER_MESSAGE)
        if not data:
            return
        fds += more
