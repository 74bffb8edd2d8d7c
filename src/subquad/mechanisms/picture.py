"""Draws who attends to whom: the weights of `pattern` on random tokens, one square for each head."""

from pathlib import Path

import torch

from subquad.mechanisms import build, mechanism

SIZE = 40


def draw(name: str, path: Path) -> None:
    """One row of heads each for bidirectional and causal, with options that suit forty tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cls = mechanism(name)
    small = cls.small[0]
    directions = [c for c, can in ((False, cls.traits.bidirectional), (True, cls.traits.causal)) if can]
    figure, axes = plt.subplots(
        len(directions), 4, figsize=(10, 2.9 * len(directions)), squeeze=False, layout="constrained"
    )
    for row, causal in zip(axes, directions, strict=True):
        torch.manual_seed(0)
        fixed = {"max_length": SIZE} if cls.traits.fixed_length else {}
        mix = build(name, dim=32, heads=4, causal=causal, **fixed, **small).eval()
        with torch.no_grad():
            weights = mix.pattern(torch.randn(1, SIZE, 32))[0].abs()
        for head, axis in enumerate(row):
            axis.set_axis_off()
            if head < len(weights):
                w = weights[head]
                axis.imshow((w / w.amax(-1, keepdim=True).clamp(min=1e-9)).numpy(), cmap="Blues", vmin=0, vmax=1)
                axis.set_title(f"{'causal' if causal else 'bidirectional'}, head {head}", fontsize=9)
    figure.suptitle(f"{name}: queries down, keys across, each row scaled to its largest weight", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
