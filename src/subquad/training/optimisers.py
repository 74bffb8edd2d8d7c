"""torch's optimisers for a model, and the clipping of gradients.

Weight decay is decoupled and applies only to matrices, not to biases, norms and embeddings. With "muon", Muon updates
the matrices inside the model, and AdamW updates the rest: vectors, and the first and the last layer.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Muon, Optimizer, RAdam

from subquad.models.embedding import Embedding, Grid
from subquad.ops.short_conv import ShortConv
from subquad.training.config import TrainingConfig
from subquad.training.pieces import in_pieces, pieces_of

MOMENTS = ("exp_avg", "exp_avg_sq")  # what Adam keeps of each parameter, beside the number of its steps


class Optimiser:
    """One or two of torch's optimisers behind one interface; the state uses the names of the parameters."""

    def __init__(self, config: TrainingConfig, model: nn.Module, capture: bool = False):
        """`capture`: make its steps fit for a CUDA graph, if it can; `capturable` says whether they are."""
        self.config = config
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.named:
            raise ValueError("the model has no parameters to train")
        self.capturable = capture and config.optimiser in ("adam", "adamw")
        self.parts = _make(config, model, self.named, self.capturable)

    def set_lr(self, lr: float) -> None:
        for part in self.parts:
            for group in part.param_groups:
                if self.capturable:
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr

    def zero_grad(self, keep: bool = False) -> None:
        """`keep`: fill the gradients with zeros instead of deleting them."""
        for part in self.parts:
            part.zero_grad(set_to_none=not keep)

    def step(self) -> None:
        for part in self.parts:
            if not (self.capturable and _update_in_pieces(part)):
                part.step()

    def state(self) -> list[Tensor]:
        """The tensors of the state that exist by now."""
        parts = [part.state[p] for part in self.parts for p in self.named.values() if p in part.state]
        return [value for state in parts for value in state.values() if isinstance(value, Tensor)]

    def tensors(self) -> dict[str, Tensor]:
        """The state, by names such as "blocks.0.ff.inner.weight/exp_avg"."""
        return {
            f"{name}/{key}": value if isinstance(value, Tensor) else torch.tensor(value)
            for part in self.parts
            for name, parameter in self.named.items()
            if parameter in part.state
            for key, value in part.state[parameter].items()
        }

    def empty_state(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
        """Empty tensors for a state of these shapes, sharded like the parameters."""
        tensors = {}
        for key, (shape, dtype) in shapes.items():
            like = self.named.get(key.rpartition("/")[0])
            fits = like is not None and like.shape == shape
            tensors[key] = torch.zeros_like(like, dtype=dtype) if fits else torch.zeros(shape, dtype=dtype)  # type: ignore[arg-type]
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for part in self.parts:
            numbers = {id(p): n for n, p in enumerate(p for group in part.param_groups for p in group["params"])}
            names = {name: numbers[id(p)] for name, p in self.named.items() if id(p) in numbers}
            state: dict[int, dict[str, Tensor]] = {}
            for key, value in tensors.items():
                name, _, what = key.rpartition("/")
                if name in names:
                    state.setdefault(names[name], {})[what] = value
            part.load_state_dict({"state": state, "param_groups": part.state_dict()["param_groups"]})


def scale_and_clip(
    parameters: list[nn.Parameter], factor: Tensor, clip: float | None, by: str, sharded: bool
) -> Tensor:
    """Multiply the gradients by `factor`, then clip them; returns their norm before clipping. Never waits for a GPU."""
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros((), device=factor.device)
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(grads)])
    if sharded:  # every rank holds a part of every tensor
        squares = norms.square()
        torch.distributed.all_reduce(squares)
        norms = squares.sqrt()
    norms = norms * factor
    norm = torch.linalg.vector_norm(norms)
    (pieces,) = in_pieces(grads)
    if clip is None:
        torch._foreach_mul_(pieces, factor)
    elif by == "norm":
        torch._foreach_mul_(pieces, factor * (clip / (norm + 1e-6)).clamp(max=1))
    else:
        torch._foreach_mul_(grads, list((factor * (clip / (norms + 1e-6)).clamp(max=1)).unbind()))
    return norm


@torch.no_grad()
def _update_in_pieces(part: Optimizer) -> bool:
    """A step of fused Adam with decoupled decay, in smaller views; False if that is no gain, or its first step."""
    calls = []
    for group in part.param_groups:
        params = [p for p in group["params"] if p.grad is not None]
        if not params or any(p not in part.state for p in params):
            return False
        moments = ([part.state[p][name] for p in params] for name in MOMENTS)
        numbers = [p.detach() for p in params]
        lists = in_pieces(numbers, [p.grad for p in params], *moments)
        if lists[0] is numbers:
            return False
        calls.append((group, [part.state[p]["step"] for p in params], params, lists))
    for group, steps, params, lists in calls:
        torch._foreach_add_(steps, 1)
        each = [step for step, p in zip(steps, params, strict=True) for _ in range(pieces_of(p))]
        how: dict[str, Any] = {name: group[name] for name in ("lr", "weight_decay", "eps")}
        how |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
        values, gradients, *averages = lists
        torch._fused_adamw_(values, gradients, averages[0], averages[1], [], each, amsgrad=False, maximize=False, **how)
    return True


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _make(
    config: TrainingConfig, model: nn.Module, named: Mapping[str, nn.Parameter], capturable: bool
) -> list[Optimizer]:
    lookups = _lookups(model)
    decayed = {name for name, p in named.items() if p.ndim >= 2 and name not in lookups}
    hidden = set()
    if config.optimiser == "muon":
        inner = {name for name in decayed if {"embedding", "head"}.isdisjoint(name.split("."))}
        hidden = {name for name in inner if named[name].ndim == 2}
    rest = [name for name in named if name not in hidden]
    groups = [
        {"params": [named[name] for name in rest if name in decayed], "weight_decay": config.weight_decay},
        {"params": [named[name] for name in rest if name not in decayed], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    kinds = {local(p).device.type for p in named.values()}
    adam: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    fused: dict[str, Any] = {"fused": True} if kinds == {"cuda"} else {}
    if capturable:
        device = next(iter(named.values())).device
        adam |= {"lr": torch.tensor(config.lr, device=device)}
        fused |= {"capturable": True}
    kind, options = {
        "radam": (RAdam, {"decoupled_weight_decay": True, "foreach": True}),
        "adam": (Adam, {"decoupled_weight_decay": True, **fused}),
    }.get(config.optimiser, (AdamW, fused))
    parts: list[Optimizer] = [kind(groups, **adam, **options)] if groups else []
    if hidden:
        matrices, decay = [named[name] for name in named if name in hidden], config.weight_decay
        same = "match_rms_adamw"  # updates as large as AdamW's, so that one lr fits both
        parts.append(Muon(matrices, config.lr, decay, config.momentum, adjust_lr_fn=same))
    return parts


def _lookups(model: nn.Module) -> set[str]:
    """Parameters with two axes that are not matrices: tables of tokens and positions, convolutions of each channel."""
    names = set()
    for path, module in model.named_modules():
        own = isinstance(module, (nn.Embedding, Grid, ShortConv))
        if own or isinstance(module, Embedding):
            names |= {f"{path}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=own)}
    return names
