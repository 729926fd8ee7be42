"""Layers: `MoE`, its routed part `RoutedExperts`, and its pieces as differentiable functions in `functional`.

For training loops: `expert_parameters`, `clip_grad_norm_`, `sharded_state`; with data parallelism beside the experts',
`exclude_experts_from_ddp` and `sum_expert_grads`.
"""

from moonep.nn import functional
from moonep.nn.experts import experts
from moonep.nn.moe import MoE
from moonep.nn.routed import RoutedExperts
from moonep.nn.router import Router, Routing
from moonep.nn.training import (
    clip_grad_norm_,
    exclude_experts_from_ddp,
    expert_parameters,
    sharded_state,
    sum_expert_grads,
)

__all__ = [
    "MoE",
    "RoutedExperts",
    "Router",
    "Routing",
    "experts",
    "functional",
    "clip_grad_norm_",
    "exclude_experts_from_ddp",
    "expert_parameters",
    "sharded_state",
    "sum_expert_grads",
]
