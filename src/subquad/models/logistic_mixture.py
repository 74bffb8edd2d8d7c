"""The image head of "Transformers are RNNs": a mixture of discretised logistics over the values of a pixel.

Paper       Salimans et al. 2017, arXiv:1701.05517, §2.1, as used by Katharopoulos et al. 2020, arXiv:2006.16236, §4.2
Definition  P(v) = Σᵢ πᵢ [σ((x + h − μᵢ)/sᵢ) − σ((x − h − μᵢ)/sᵢ)],  x = 2v/(n−1) − 1,  h = 1/(n−1),
            s = exp(max(log s, −7)); the first cell reaches to −∞ and the last to +∞
Departures  one channel at a time; here loss and sampler use the same distribution. The paper's public sampler has
            s = elu + 1 and its loss has exp, so for wide scales it draws from another distribution than was trained
Verified    tests/models/test_logistic_mixture.py: probabilities sum to one, drawn frequencies are those of the loss

Outputs of a model are [..., 3·components]: log-weights, means and log-scales.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.models.loss import Reduction, over_targets
from subquad.models.sampling import gumbel_of
from subquad.ops.impl import Impl, choose
from subquad.ops.precision import wide
from subquad.ops.uniform import uniform

VALUES = 256
LAST = VALUES - 1
LEAST_LOG_SCALE = -7.0


def loss(
    outputs: Tensor,
    targets: Tensor,
    lengths: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """-log P(targets) in nats: outputs [B, T, 3·components], integers [B, T]; reductions as in cross_entropy."""

    def losses(values: Tensor) -> Tensor:
        return -log_prob(outputs, values)

    return over_targets(losses, outputs, VALUES, targets, lengths, ignore_index, reduction)


def log_prob(outputs: Tensor, values: Tensor) -> Tensor:
    """log P(values): outputs [..., 3·components], integers [...] from 0 to 255 -> [...] in nats."""
    weights, means, scales = _parameters(outputs)
    return torch.logsumexp(weights + _cells(values[..., None], means, scales), -1)


def log_probs(outputs: Tensor) -> Tensor:
    """log P of every value: [..., 256]."""
    weights, means, scales = (part[..., None, :] for part in _parameters(outputs))
    values = torch.arange(VALUES, device=outputs.device)[:, None]
    return torch.logsumexp(weights + _cells(values, means, scales), -1)


def draw(outputs: Tensor, seeds: Tensor, position: Tensor, impl: Impl = "auto") -> Tensor:
    """One value per row, [B, 3·components] -> [B]: draw a component, then a logistic number, and take its cell."""
    reason = "float64" if outputs.dtype == torch.float64 else None
    if choose(impl, "logistic_mixture.draw", outputs, reason) == "triton":
        return torch.ops.subquad.draw_from_mixture(outputs.contiguous(), seeds, position)
    weights, means, scales = _parameters(outputs)
    noise = uniform(seeds, position, weights.shape[-1] + 1)  # one for each component, and one for the number
    chosen = (weights + gumbel_of(noise[:, :-1])).argmax(-1, keepdim=True)
    u = noise[:, -1:].to(weights.dtype)
    x = means.gather(-1, chosen) + scales.gather(-1, chosen).exp() * (u.log() - torch.log1p(-u))
    return ((x[:, 0] + 1) * (LAST / 2)).round().clamp(0, LAST).long()


torch.library.define("subquad::draw_from_mixture", "(Tensor outputs, Tensor seeds, Tensor position) -> Tensor")


@torch.library.impl("subquad::draw_from_mixture", "CompositeExplicitAutograd")
def _(outputs: Tensor, seeds: Tensor, position: Tensor) -> Tensor:
    from subquad.models import sampling_triton

    return sampling_triton.draw_from_mixture(outputs, seeds, position, VALUES, LEAST_LOG_SCALE)


@torch.library.register_fake("subquad::draw_from_mixture")
def _(outputs: Tensor, seeds: Tensor, position: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(seeds)


def _parameters(outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-weights that are normalised, means, log-scales that are clamped; at least float32."""
    if outputs.shape[-1] % 3:
        raise ValueError(f"outputs has width {outputs.shape[-1]}: accepted is three numbers a component")
    weights, means, scales = wide(outputs).chunk(3, dim=-1)
    return weights.log_softmax(-1), means, scales.clamp(min=LEAST_LOG_SCALE)


def _cells(values: Tensor, means: Tensor, scales: Tensor) -> Tensor:
    """log of each component's mass in the cells of `values`."""
    x = values.to(means.dtype) * (2 / LAST) - 1
    rate = torch.exp(-scales)
    high, low = (x + 1 / LAST - means) * rate, (x - 1 / LAST - means) * rate
    width = rate * (2 / LAST)
    # σ(b) − σ(a) = σ(b) σ(−a) (1 − e^(a−b)), whose logarithm is exact however far out the cell lies
    inside = F.logsigmoid(high) + F.logsigmoid(-low) + torch.log(-torch.expm1(-width))
    inside = torch.where(values == 0, F.logsigmoid(high), inside)
    return torch.where(values == LAST, F.logsigmoid(-low), inside)
