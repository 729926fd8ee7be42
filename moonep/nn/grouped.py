"""Grouped SwiGLU: rows of each group through its own expert's weights, and the gradients of all of it.

    gate, up = x Wgate[g], x Wup[g]         [n, F]
    z = silu(gate) * up * route weight      [n, F]
    y = z Wdown[g]                          [n, H]

Groups are given by their end rows, on the device: nothing that the host of a GPU does depends on them. How the products
are made is `moonep.nn.products`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from torch import Tensor

from moonep.nn.products import Job, Products, choose

Weights = Mapping[str, Tensor]  # gate [G, H, F], up [G, H, F], down [G, F, H]
Ready = Callable[[str], None]

ORDER, BACKWARD_ORDER = ("gate", "up", "down"), ("down", "gate", "up")  # in which weights are used first


def compute(
    weights: Weights,
    offsets: Tensor,
    hidden: Tensor,
    route_weights: Tensor,
    *,
    out: Tensor | None = None,
    first: int | None = None,
    ready: Ready | None = None,
    token_padding: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """The experts' output, and the rows in use times gate and up.

    Args:
        weights: of the groups, in the dtype of the rows.
        offsets: [G] int32: end row of each group.
        hidden: [C, H]. Rows past the last offset have no influence.
        route_weights: [C] fp32.
        out: [C, H] to write the output to; None: a new tensor.
        first: how many groups need not wait for `ready`; None: all.
        ready: called with a projection's name before other groups' weights are used, in the order of ORDER, after the
            work that does not need them was enqueued; None: they are ready.
        token_padding: groups have multiples of so many rows; those that are padding are zero.

    Returns:
        Output [C, H], undefined past the last offset; [n, F] and [n, F], n <= C.
    """
    products = choose(weights, offsets, [hidden], first, token_padding)
    gate, up = _multiply_gate_up(products, hidden, weights, ready)
    z = products.activate(gate, up, route_weights)
    if ready is not None:
        ready("down")
    (out,) = products.multiply(Job([(z, weights["down"])], out))
    return products.all_rows(out), gate, up


def differentiate(
    weights: Weights,
    grads: Weights,
    offsets: Tensor,
    grad_out: Tensor,
    hidden: Tensor,
    route_weights: Tensor,
    products_saved: Sequence[Tensor] = (),
    *,
    in_place: bool = False,
    fresh: Collection[str] = (),
    first: int | None = None,
    ready: Ready | None = None,
    weights_done: Callable[[], None] | None = None,
    token_padding: int = 1,
) -> tuple[Tensor, Tensor]:
    """The backward of `compute`: adds weight gradients to `grads`, and returns those of rows and route weights.

    Args:
        weights, offsets, first, token_padding: of `compute`.
        grads: fp32, like `weights`; those that are wanted. Those of groups without rows are not touched.
        grad_out: [C, H], of its output.
        hidden, route_weights: its inputs, at least the rows in use.
        products_saved: what it returned with the output; empty: computed again.
        in_place: write the gradient of the rows over `grad_out`.
        fresh: of which projections the first groups' gradients start from zero, whatever is in `grads`.
        ready: see `compute`; in the order of BACKWARD_ORDER, or of ORDER if products are computed again.
        weights_done: called when all weight gradients have been enqueued, before the gradient of the rows.

    Returns:
        [C, H], undefined past the last offset; [C] fp32.
    """
    products = choose(weights, offsets, [grad_out, hidden], first, token_padding)
    again = not products_saved
    gate, up = _multiply_gate_up(products, hidden, weights, ready) if again else products_saved
    waits = None if ready is None else partial(ready, "down")
    (grad_z,) = products.multiply(Job([(grad_out, weights["down"])], transposed=True, ready=waits))
    grad_gate, grad_up, z, grad_weights = products.differentiate(grad_z, gate, up, route_weights)
    del grad_z, gate, up
    pairs = {"gate": (hidden, grad_gate), "up": (hidden, grad_up), "down": (z, grad_out)}
    assert set(fresh) <= set(grads), "what starts from zero is written here"
    own = len(offsets) if first is None else first
    for name, grad in grads.items():
        products.add_weight_grad(grad, *pairs[name], fresh=own if name in fresh else 0)
    if weights_done is not None:
        weights_done()
    del pairs, z
    if ready is not None and not again:
        ready("gate")
        ready("up")
    (grad_hidden,) = products.multiply(
        Job([(grad_gate, weights["gate"]), (grad_up, weights["up"])], grad_out if in_place else None, transposed=True)
    )
    return products.all_rows(grad_hidden), grad_weights


def _multiply_gate_up(products: Products, x: Tensor, weights: Weights, ready: Ready | None) -> list[Tensor]:
    names = ("gate", "up")
    waits = [None if ready is None else partial(ready, name) for name in names]
    return products.multiply(*(Job([(x, weights[n])], ready=wait) for n, wait in zip(names, waits, strict=True)))


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Rows of group g times weight[g]: [n, H] x [G, H, F] -> [n, F]. `offsets`: [G] int32 end rows, the last one n."""
    return choose({"weight": weight}, offsets, [x], None, 1).multiply(Job([(x, weight)]))[0]


def add_weight_grad(grad: Tensor, x: Tensor, grad_y: Tensor, offsets: Tensor, token_padding: int = 1) -> None:
    """grad[g] += x[rows of g]^T grad_y[rows of g] in fp32; groups without rows are not changed."""
    choose({}, offsets, [x, grad_y], None, token_padding).add_weight_grad(grad, x, grad_y)
