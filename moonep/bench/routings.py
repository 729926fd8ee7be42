"""Which router outputs are timed: each has a kind, a strength and a seed, and is the same for all ranks and peers."""

from __future__ import annotations

import ast
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moonep.dims import align_up
from moonep.testing import routing

HOT_EXPERTS = 8
PLAIN_KINDS = ("uniform", "all_local", "all_remote", "all_to_one_expert")
_TRACE_DTYPES = {"|u1": torch.uint8, "<u2": torch.uint16, "<i2": torch.int16, "<i4": torch.int32, "<i8": torch.int64}


@dataclass(frozen=True)
class Routing:
    """One router output of all ranks.

    Attributes:
        kind: "lognormal" (value: maxvio), "hot_rank" (value: rank imbalance by 8 hot experts of rank 0), "adverse"
            (value: rank imbalance by all experts of rank 0, for which no plan with few copies exists), "trace" (value:
            layer), or one of PLAIN_KINDS.
        value: the strength.
        seed: of the noise.
        path: of a trace: an .npz file with `topk_ids` [layers, tokens, K].
    """

    kind: str
    value: float = 0.0
    seed: int = 1
    path: str | None = None

    @property
    def label(self) -> str:
        """What people read."""
        if self.kind == "trace":
            return f"trace {Path(self.path or '').stem} layer {self.value:g}"
        return self.kind if self.kind in PLAIN_KINDS else f"{self.kind} {self.value:g}"

    def make(self, s: int, E: int, K: int, R: int, device: torch.device | str = "cpu") -> list[Tensor]:
        """R tensors [s, K] int32, one a rank, on the CPU.

        Args:
            s: tokens of a rank.
            E, K, R: see `moonep.dims`.
            device: where to search for the strength.

        Raises:
            ValueError: the strength is out of reach, or the trace has too few tokens.
        """
        if self.kind == "lognormal":
            return routing.lognormal(s, E, K, R, self.value, self.seed, device)
        if self.kind == "hot_rank":
            return routing.hot_rank(s, E, K, R, self.value, HOT_EXPERTS, self.seed, device)
        if self.kind == "adverse":
            return routing.hot_rank(s, E, K, R, self.value, E // R, self.seed, device)
        if self.kind == "uniform":
            return routing.uniform(s, E, K, R, self.seed)
        if self.kind == "all_to_one_expert":
            return routing.all_to_one_expert(s, E, K, R)
        if self.kind == "trace":
            return self._trace(s, K, R)
        makers = {"all_local": routing.all_local, "all_remote": routing.all_remote}
        if self.kind not in makers:
            raise ValueError(f"routing: given {self.kind!r}, expected one of {', '.join(PLAIN_KINDS)}")
        return makers[self.kind](s, E, K, R, self.seed)

    def _trace(self, s: int, K: int, R: int) -> list[Tensor]:
        ids = read_array(self.path or "", "topk_ids")[int(self.value)].int()
        if ids.shape[0] < R * s or ids.shape[1] != K:
            raise ValueError(
                f"trace: given {ids.shape[0]} tokens with {ids.shape[1]} experts, expected {R * s} with {K}"
            )
        return [part.contiguous() for part in ids[: R * s].view(R, s, K)]

    def record(self) -> dict[str, Any]:
        """What a result line says of it. The name of a trace, not where it lies."""
        name = None if self.path is None else Path(self.path).name
        return {"kind": self.kind, "value": self.value, "seed": self.seed, **({"trace": name} if name else {})}


@dataclass(frozen=True)
class TraceSizes:
    """What a trace holds: layers, tokens, K, and E as the ids show it."""

    layers: int
    tokens: int
    K: int
    E: int

    @staticmethod
    def of(path: str, R: int) -> TraceSizes:
        ids = read_array(path, "topk_ids")
        layers, tokens, K = ids.shape
        return TraceSizes(layers, tokens, K, align_up(int(ids.max()) + 1, R))


def read_array(path: str | Path, name: str) -> Tensor:
    """An array of an .npz file, without numpy."""
    with zipfile.ZipFile(path) as archive:
        data = archive.read(f"{name}.npy")
    wide = data[6] > 1  # versions 2 and 3 have a longer length field
    length = struct.unpack("<I" if wide else "<H", data[8 : 12 if wide else 10])[0]
    start = (12 if wide else 10) + length
    header = ast.literal_eval(data[start - length : start].decode("latin1"))
    if header["fortran_order"] or header["descr"] not in _TRACE_DTYPES:
        raise ValueError(f"{name}: given {header}, expected integers in C order")
    flat = torch.frombuffer(bytearray(data[start:]), dtype=_TRACE_DTYPES[header["descr"]])
    return flat.view(header["shape"])
