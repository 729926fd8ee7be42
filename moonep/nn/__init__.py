"""Layers: `MoE`, and its parts as differentiable functions in `functional`."""

from moonep.nn import functional
from moonep.nn.experts import experts
from moonep.nn.moe import MoE
from moonep.nn.router import Router, Routing

__all__ = ["MoE", "Router", "Routing", "experts", "functional"]
