"""Layers: `MoE`, its routed part `RoutedExperts`, and its pieces as differentiable functions in `functional`.

For training loops: `expert_parameters`, `clip_grad_norm_` and `sharded_state`.
"""

from moonep.nn import functional
from moonep.nn.experts import experts
from moonep.nn.moe import MoE
from moonep.nn.routed import RoutedExperts
from moonep.nn.router import Router, Routing
from moonep.nn.training import clip_grad_norm_, expert_parameters, sharded_state

__all__ = [
    "MoE",
    "RoutedExperts",
    "Router",
    "Routing",
    "experts",
    "functional",
    "clip_grad_norm_",
    "expert_parameters",
    "sharded_state",
]
