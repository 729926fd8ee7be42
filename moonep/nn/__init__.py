"""Layers: `MoE`, its routed part `RoutedExperts`, and its pieces as differentiable functions in `functional`."""

from moonep.nn import functional
from moonep.nn.experts import experts
from moonep.nn.moe import MoE
from moonep.nn.routed import RoutedExperts
from moonep.nn.router import Router, Routing

__all__ = ["MoE", "RoutedExperts", "Router", "Routing", "experts", "functional"]
