"""What a training loop asks of a model with experts: which parameters they are, the norm of all gradients, and a state
for checkpoints that does not depend on the number of ranks.

Rank r has experts r L to (r + 1) L - 1 and nobody else has them; all other parameters are equal on all ranks. So what
runs over all parameters counts an expert where it lives, and everything else once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from moonep.nn.checks import check_number, check_type
from moonep.pool import ExpertPool


def expert_parameters(model: nn.Module) -> dict[nn.Parameter, ExpertPool]:
    """This rank's own experts in a model, with their pools: masters of every pool that is an attribute of a module.

    Args:
        model: any module; without experts there are none.

    Returns:
        {parameter [L, ...] fp32: its pool}, in the order of the model's modules.

    Raises:
        ValueError: not a module.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    pools = [value for module in model.modules() for value in vars(module).values() if isinstance(value, ExpertPool)]
    return {parameter: pool for pool in pools for parameter in pool.master.values()}


def exclude_experts_from_ddp(model: nn.Module) -> None:
    """Make `DistributedDataParallel(model)` leave out experts, and the loads that layers count. Before wrapping.

    DistributedDataParallel would make the experts of all ranks equal, and wait for gradients that autograd never shows
    it. A layer that it manages raises a ValueError in forward. Whatever else it was told to leave out stays so.

    Args:
        model: what is going to be wrapped; it is marked in place. Each `MoE` marks itself.

    Raises:
        ValueError: not a module.
    """
    experts = expert_parameters(model)
    counting = [name for name, module in model.named_modules() if isinstance(getattr(module, "pool", None), ExpertPool)]
    loads = {f"{name}.load".removeprefix(".") for name in counting}
    ignored = {name for name, p in model.named_parameters() if p in experts}
    ignored |= {name for name, _ in model.named_buffers() if name in loads}
    ignored |= set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(ignored))


@torch.no_grad()
def sum_expert_grads(model: nn.Module, group: dist.ProcessGroup, divide_by: float = 1.0) -> None:
    """Add up the gradients of this rank's own experts over the ranks that have the same ones. Collective.

    For expert and data parallelism together: the experts of each EP group are copies of each other, and `group` are the
    ranks with the same place in theirs. All other parameters are summed over all ranks, by whatever framework.

    Args:
        model: the same on all ranks.
        group: the data-parallel ranks, such as `mesh["dp"].get_group()`.
        divide_by: what the sums are divided by: all ranks, EP times data-parallel, where a framework takes the mean of
            the other gradients, as DistributedDataParallel and FSDP do.

    Raises:
        ValueError: a bad argument, on this rank alone: peers wait for it in the all-reduce.

    Visible when it returns: `local_grad` of this rank, and `.grad` of its experts, are the sums (on CUDA: the stream
    waits for them). Frozen projections are left out.

    Moves: an all-reduce of `L` experts in fp32, a projection at a time.
    """
    pools = dict.fromkeys(expert_parameters(model).values())
    check_type("group", group, dist.ProcessGroup, "a process group")
    check_number("divide_by", divide_by)
    if divide_by == 0:
        raise ValueError("divide_by: given 0, expected another number")
    for pool in pools:
        pool.ready_gradients()
        for name, grad in pool.local_grad.items():
            if pool.trains(name):
                total = grad.contiguous()  # rows of experts may be padded
                dist.all_reduce(total, group=group)
                torch.div(total, divide_by, out=grad)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`. Collective; does not wait for the device.

    Args:
        model: the same on all ranks; gradients of parameters other than experts have been summed over the ranks, and
            may be DTensors of one mesh.
        max_norm: of the gradients of the whole model: experts of all ranks, everything else once. Infinity: measure
            alone.

    Returns:
        [] fp32, the norm before, equal on all ranks.

    Raises:
        ValueError: a bad argument, on this rank alone: peers wait for it in the all-reduce.

    Visible when it returns: all `.grad` of this rank are scaled, in place.

    Moves: an all-reduce of one number a group of experts.
    """
    pools = expert_parameters(model)
    check_number("max_norm", max_norm, least=0)
    replicated = [p.grad for p in model.parameters() if p.grad is not None and p not in pools]
    squares = _whole(nn.utils.get_total_norm(replicated)).float().square()
    for group in {pool.group: None for pool in pools.values()}:
        own = [p.grad for p, pool in pools.items() if pool.group is group and p.requires_grad and p.grad is not None]
        experts = nn.utils.get_total_norm(own).to(squares.device).float().square()
        if group is not None:
            dist.all_reduce(experts, group=group)
        squares = squares.to(experts.device) + experts
    norm = squares.sqrt()
    for parameters in (list(pools), [p for p in model.parameters() if p not in pools]):  # DTensors do not mix
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _whole(tensor: Tensor) -> Tensor:
    """A DTensor's value on every rank of its mesh; any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def sharded_state(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Parameters, buffers and optimizer state by name, for `torch.distributed.checkpoint`. Moves nothing.

    Experts, and what the optimizer keeps of them, are global tensors: DTensors [E, ...] sharded over the pool's group
    on dim 0. So a checkpoint of R ranks loads on any number that divides E. All else is saved once.

    The tensors are those of the model and of the optimizer, and loading writes into them:

        dcp.save(sharded_state(model, optimizer), checkpoint_id=path)
        dcp.load(sharded_state(model, optimizer), checkpoint_id=path)

    Compute weights follow in the next forward, as after an optimizer's step.

    Args:
        model: not wrapped by `torch.compile`, which changes names.
        optimizer: of parameters of the model. State that it does not have yet is made, as zeros. Its options, such as
            the learning rate, are not part of the state.

    Returns:
        {"model": {name: tensor}, "optimizer": {name: {key: tensor}}}

    Raises:
        ValueError: not a module or an optimizer; the optimizer has parameters that the model has not, or keeps state
            that is not a tensor.
    """
    pools = expert_parameters(model)
    names = {p: name for name, p in model.named_parameters()}
    weights = model.state_dict()
    for expert, pool in pools.items():
        if expert in names:
            weights[names[expert]] = _over_all_ranks(expert.detach(), pool)
    if optimizer is None:
        return {"model": weights}
    check_type("optimizer", optimizer, Optimizer, "None or a torch.optim.Optimizer")
    _make_missing_state(optimizer)
    states: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, nn.Parameter) or parameter not in names:
            raise ValueError(f"optimizer: given a parameter {list(parameter.shape)} that is not one of the model")
        name = names[parameter]
        states[name] = {}
        for key, value in state.items():
            if not isinstance(value, Tensor):
                raise ValueError(f"optimizer: given {key} = {value!r} of {name}, expected a tensor")
            whole = parameter in pools and value.shape == parameter.shape
            states[name][key] = _over_all_ranks(value, pools[parameter]) if whole else value
    return {"model": weights, "optimizer": states}


def _over_all_ranks(local: Tensor, pool: ExpertPool) -> Tensor:
    """[L, ...] of every rank -> [E, ...], in the same memory."""
    if pool.R == 1:
        return local
    from torch.distributed.device_mesh import DeviceMesh  # here: they take most of a second
    from torch.distributed.tensor import DTensor, Shard

    assert pool.group is not None
    mesh = DeviceMesh.from_group(pool.group, local.device.type)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


@torch.no_grad()
def _make_missing_state(optimizer: Optimizer) -> None:
    """Give the optimizer zeros where it has no state: by a step of these parameters alone, which is then undone."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    missing = [p for p in parameters if not optimizer.state.get(p)]
    if not missing:
        return
    grads, values = [p.grad for p in parameters], [p.clone() for p in missing]
    for p in parameters:
        p.grad = None
    for p in missing:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad
    for p, value in zip(missing, values, strict=True):
        p.copy_(value)  # not a rate of zero: some optimizers divide by it
        for kept in optimizer.state[p].values():
            if isinstance(kept, Tensor):
                kept.zero_()
