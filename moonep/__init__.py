"""MoonEP: expert parallelism in which every rank computes the same number of rows, whatever the router does.

`Buffer` moves rows, `ExpertPool` holds expert weights with slots for redundant experts, `Plan` is one call's routing.
"""

from moonep.buffer import Buffer
from moonep.errors import PeerError, PeerTimeout, StaleSlotsError
from moonep.plan import Plan
from moonep.pool import ExpertPool

__version__ = "0.1.0"

MoonEPCommPlan = Plan

__all__ = [
    "Buffer",
    "ExpertPool",
    "MoonEPCommPlan",
    "PeerError",
    "PeerTimeout",
    "Plan",
    "StaleSlotsError",
    "__version__",
]
