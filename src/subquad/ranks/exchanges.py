"""Exchanges as functions of autograd: what each does in backward."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from subquad.gradients import once_differentiable
from subquad.ranks.collectives import Group, all_gather, all_to_all, reduce


def moved(state: Tensor, by: Tensor | None, matrix: bool) -> Tensor:
    if by is None:
        return state
    if not matrix:
        return by * state
    with torch.autocast(state.device.type, enabled=False):
        return by @ state


class Prefix(torch.autograd.Function):
    """The states P_0 = 0, P_{r+1} = A_r P_r + S_r: before this rank's part, and after the last one.

    Gradients go the other way: G_r = g_r + A_rᵀ G_{r+1} from those of the states before each rank's part, where G after
    the last is the sum of all ranks' gradients of the end; then dS_r = G_{r+1} and dA_r = G_{r+1} P_rᵀ.
    """

    @staticmethod
    def forward(
        ctx: Any, added: Tensor, by: Tensor | None, matrix: bool, ends: bool, group: Group
    ) -> tuple[Tensor, Tensor]:
        parts = [added] if by is None else [added, by]
        flat = all_gather(torch.cat([p.reshape(-1) for p in parts]), group, "states")
        every = flat[:, : added.numel()].view(-1, *added.shape)
        steps = None if by is None else flat[:, added.numel() :].view(-1, *by.shape)
        state = torch.zeros_like(added)
        before = state
        for r in range(group.world if ends else group.rank):
            before = state if r == group.rank else before
            state = moved(state, None if steps is None else steps[r], matrix) + every[r]
        if not ends:
            before = state
        ctx.group, ctx.matrix, ctx.ends = group, matrix, ends
        ctx.save_for_backward(before, *(() if steps is None else (steps,)))
        return before.clone(), state if ends else state.new_zeros(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dbefore: Tensor, dafter: Tensor) -> tuple[Tensor | None, ...]:
        before, *rest = ctx.saved_tensors
        steps, group = rest[0] if rest else None, ctx.group
        sent = torch.stack([dbefore, dafter]) if ctx.ends else dbefore[None]
        every = all_gather(sent, group, "states")  # [ranks, 1 or 2, R, H, K, V]
        later = every[:, 1].sum(0) if ctx.ends else torch.zeros_like(before)
        for r in range(group.world - 1, group.rank, -1):
            step = None if steps is None else steps[r]
            later = every[r, 0] + moved(later, step.mT if step is not None and ctx.matrix else step, ctx.matrix)
        if steps is None:
            dby = None
        elif ctx.matrix:
            with torch.autocast(later.device.type, enabled=False):
                dby = later @ before.mT
        else:
            dby = (later * before).sum_to_size(steps.shape[1:])
        return later, dby, None, None, None


class Exchange(torch.autograd.Function):
    """All-to-all of a flat tensor: send[r] elements to rank r, receive[r] from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, send: list[int], receive: list[int], what: str) -> Tensor:
        ctx.given = group, receive, send, what
        return all_to_all(x, group, send, receive, what)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return all_to_all(grad.contiguous(), *ctx.given), None, None, None, None


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, what: str) -> Tensor:
        ctx.group, ctx.what = group, what
        return all_gather(x, group, what)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The sum of what the ranks send back."""
        size = grad[0].numel()
        got = all_to_all(grad.reshape(-1), ctx.group, [size] * len(grad), [size] * len(grad), ctx.what)
        wide = torch.promote_types(grad.dtype, torch.float32)
        return got.view_as(grad).sum(0, dtype=wide).to(grad.dtype), None, None


class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, what: str) -> Tensor:
        ctx.group, ctx.what = group, what
        return reduce(x, group, what, dist.ReduceOp.SUM)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return reduce(grad, ctx.group, ctx.what, dist.ReduceOp.SUM), None, None


class Result(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:  # noqa: ARG004
        return reduce(x, group, "result", dist.ReduceOp.SUM)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        return grad, None


class Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: int) -> Tensor:
        ctx.world = world
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad / ctx.world, None


class Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *received: Tensor) -> Tensor:
        ctx.like = [(t.shape, t.dtype, t.device) for t in received]
        ctx.save_for_backward(x.new_empty(0))  # so that under checkpointing every rank runs the exchange again
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        _ = ctx.saved_tensors
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
