"""The legend: every dimension letter of MoonEP, and the sizes that follow from them.

| letter | meaning                              | letter | meaning                                  |
|--------|--------------------------------------|--------|------------------------------------------|
| R      | EP ranks                             | B      | slots for redundant experts on a rank    |
| S      | capacity in tokens of a rank         | G      | weight rows / groups: E + B              |
| s      | tokens of one call, 0 <= s <= S      | H      | hidden size                              |
| K      | experts per token (top-k)            | F      | expert FFN width                         |
| E      | routed experts in the EP group       | P      | row padding of a group (`token_padding`) |
| L      | home experts of a rank, E / R        | C      | rows of a receive buffer                 |
| A      | assignments of a full rank, S x K    | W      | partial sums a token can get: min(R, K)  |

Tensor names carry these letters as suffixes (`load_RE` is [R, E]).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

PPM = 1_000_000
# Assignments of compute that one exposed weight copy costs: FLOP/s * bytes / (2 * bandwidth), estimated for an H200 in
# bf16.
COPY_COST_ASSIGNMENTS = 1500
MAX_TOP_K = 32
MAX_RANKS = 128
ROW_ALIGNMENT_BYTES = 16


def ceil_div(n: int, d: int) -> int:
    """n / d, rounded up."""
    return -(-n // d)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not less than n >= 1. (Triton's own takes microseconds on the host.)"""
    return 1 << (n - 1).bit_length()


def align_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is >= `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Balance:
    """How many assignments more than its equal share a rank may compute.

    Attributes:
        eps_ppm: tolerance in parts per million of the mean load of a rank.
        slack: assignments a rank may compute more than its share in any case (never beyond the receive buffer):
            a surplus smaller than this costs less than copying an expert's weights.
    """

    eps_ppm: int = 0
    slack: int = 0

    @staticmethod
    def parse(value: str | float | Balance) -> Balance:
        """`"exact"`, `"auto"`, or a tolerance such as 0.01 (1%)."""
        if isinstance(value, Balance):
            parsed = value
        elif value == "exact":
            parsed = Balance()
        elif value == "auto":
            parsed = Balance(slack=COPY_COST_ASSIGNMENTS)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1:
            parsed = Balance(eps_ppm=round(value * PPM))
        else:
            raise ValueError(f"balance: given {value!r}, expected 'exact', 'auto' or a tolerance between 0 and 1")
        if not 0 <= parsed.eps_ppm <= PPM or parsed.slack < 0:
            raise ValueError(f"balance: given {value!r}, expected 0 <= eps_ppm <= {PPM} and slack >= 0")
        return parsed

    @property
    def exact(self) -> bool:
        return self.eps_ppm == 0 and self.slack == 0


@dataclass(frozen=True)
class Dims:
    """The sizes of one EP group and all that is derived from them. Immutable and equal on every rank."""

    S: int
    K: int
    E: int
    R: int
    H: int
    B: int
    P: int = 128
    balance: Balance = Balance()

    @cached_property
    def L(self) -> int:
        """Home experts of a rank."""
        return self.E // self.R

    @cached_property
    def G(self) -> int:
        """Weight rows: one group of rows each."""
        return self.E + self.B

    @cached_property
    def A(self) -> int:
        """Assignments of a full rank."""
        return self.S * self.K

    @cached_property
    def max_rows(self) -> int:
        """Most assignments a rank may compute: A, and the tolerance on top."""
        return self.A + self.A * self.balance.eps_ppm // PPM

    @cached_property
    def max_redundant(self) -> int:
        """Most redundant experts a rank can get: those of one foreign home (I4 of `moonep.planner.policy`)."""
        return min(self.L, self.E - self.L)

    @cached_property
    def C(self) -> int:
        """Rows of a receive buffer: every group padded in the worst case. Static: no routing changes it."""
        return align_up(self.max_rows + (self.P - 1) * (self.L + self.max_redundant), self.P)

    @cached_property
    def W(self) -> int:
        """Partial sums that a token can get in combine: one a rank, no more than it has experts."""
        return min(self.R, self.K)

    @property
    def spills(self) -> bool:
        """Whether a redundant expert may find no slot, so that it is read from its home rank."""
        return self.B < self.max_redundant

    def home(self, expert: int) -> int:
        """The rank that owns `expert`."""
        return expert // self.L

    def validate(self) -> None:
        """Raise a ValueError that names the argument when the sizes cannot work."""
        for name, value in (
            ("S", self.S),
            ("H", self.H),
            ("K", self.K),
            ("E", self.E),
            ("num_ep_ranks", self.R),
            ("token_padding", self.P),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: given {value!r}, expected an integer >= 1")
        if not isinstance(self.B, int) or isinstance(self.B, bool) or self.B < 0:
            raise ValueError(f"B: given {self.B!r}, expected an integer >= 0")
        if self.E % self.R:
            raise ValueError(f"E: given {self.E}, expected a multiple of num_ep_ranks = {self.R}")
        if self.K > MAX_TOP_K:
            raise ValueError(f"K: given {self.K}, expected at most {MAX_TOP_K}")
        if self.R > MAX_RANKS:
            raise ValueError(f"num_ep_ranks: given {self.R}, expected at most {MAX_RANKS}")
        if self.C >= 1 << 24:
            raise ValueError(
                f"S: given {self.S}, which needs receive buffers of {self.C} rows; expected less than 2^24"
            )
        if self.R * self.C >= 1 << 31 or self.R * self.S * self.W >= 1 << 30:
            raise ValueError(
                f"S: given {self.S} on {self.R} ranks, whose {self.R * self.C} rows do not fit 31-bit row numbers "
                f"(or {self.R * self.S * self.W} partial sums 30-bit ones); expected a smaller S"
            )
