"""Whole models beside the same model in plain torch: training steps, memory, decoding, and small models.

    python benchmarks/whole_models.py --out DIR             everything; figures to DIR/whole_models.json
    python benchmarks/whole_models.py --out DIR --sections train --modes eager --lengths 1024,8192
    python benchmarks/whole_models.py --out DIR --sections decode,classifier --names linear --batches 256
    python benchmarks/whole_models.py --tiny --out DIR      every section with tiny sizes on the CPU, as a trial

The plain model is `PlainGPT`: torch's scaled_dot_product_attention, LayerNorm, GELU and cross-entropy, with rotary
positions from tables. `check` copies our weights into it and compares losses and gradients, to show that both are the
same model. Models take turns, so that a drifting clock affects all of them; ratios are of one round. Figures are
written as they come; those of an earlier run in DIR stay, if they are not measured again, with their commit.
"""

import argparse
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad import Classifier, LanguageModel
from subquad.machine import commit, machine, tell_commit
from subquad.measure.cost import once
from subquad.models.loss import cross_entropy
from subquad.studies.reproduce.scaling import Iteration, iterations
from subquad.studies.results import save
from subquad.tasks.lra.task import Classification, Labelled
from subquad.tasks.text import Text
from subquad.training.config import TrainingConfig
from subquad.training.task import Batch, Loss, Source, Split
from subquad.training.train import learn

Figures = dict[str, Any]
Found = Iterator[tuple[str, Any]]  # figures by name, as they come

GPT2_SMALL: Mapping[str, int] = {"vocab": 8192, "dim": 768, "depth": 12, "heads": 12}
TINY: Mapping[str, int] = {"vocab": 256, "dim": 32, "depth": 2, "heads": 2}
OURS: Mapping[str, Any] = {"softmax": "softmax", "linear": "linear", "local": ("local", {"window": 512})}
ALL_LOGITS = ", all logits"
TOKENS = 32768  # of a training step
MODES = ("eager", "compiled", "blocks", "step")  # the model compiled; each block; the loss, as the trainer compiles it
BARS: Mapping[str, Any] = {  # must, goal
    "training step, softmax over plain, compiled": (1.03, 0.97),
    "training step, linear over plain compiled softmax at 1k / 8k / 32k": ((1.05, 0.75, 0.35), (0.95, 0.65, 0.28)),
    "training step, softmax over plain, eager": (1.08, 1.0),
    "peak memory, softmax over plain": (1.0, 0.8),
    "decode, batch 1, ms a token, linear / softmax": ((0.40, 0.60), (0.2, 0.35)),
    "decode, batch 256, tokens a second, linear": (300_000, 500_000),
    "second generate call, ms beyond prompt and steps": (20, 5),
    "captured training of a small classifier, steps a second, linear / softmax": ((500, 350), (1000, 600)),
}


class PlainBlock(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.ff_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.inner, self.ff_out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, K]
        o = F.scaled_dot_product_attention(turn(q, cos, sin), turn(k, cos, sin), v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).flatten(-2))
        return x + self.ff_out(F.gelu(self.inner(self.ff_norm(x))))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class PlainGPT(nn.Module):
    """What one writes in torch without a library."""

    def __init__(self, vocab: int, dim: int, depth: int, heads: int):
        super().__init__()
        self.width = dim // heads
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(PlainBlock(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        rates = 10000 ** -(torch.arange(0, self.width, 2, device=x.device) / self.width)
        angle = (torch.arange(tokens.shape[1], device=x.device)[:, None] * rates).repeat(1, 2)
        kind = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        cos, sin = angle.cos().to(kind), angle.sin().to(kind)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))

    def copy(self, model: LanguageModel) -> "PlainGPT":
        """Take over the weights of ours."""
        for mine, theirs in self._pairs(model):
            mine.load_state_dict(theirs.state_dict())
        with torch.no_grad():
            self.embedding.weight.copy_(model.embedding.weight * model.embedding.scale)
        return self

    def _pairs(self, model: Any) -> Iterator[tuple[nn.Module, nn.Module]]:
        """The layers that hold the same weights, of this model and of ours."""
        yield self.norm, model.transformer.norm
        yield self.head, model.head
        plain: Any
        for plain, block in zip(self.blocks, model.transformer.blocks, strict=True):
            yield plain.norm, block.mixer_residual.norm
            yield plain.ff_norm, block.ff_residual.norm
            yield plain.qkv, block.mixer.heads.qkv
            yield plain.out, block.mixer.heads.out
            yield plain.inner, block.ff.inner
            yield plain.ff_out, block.ff.out


class PlainText(Text):
    """The loss as one writes it in torch."""

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        tokens = batch["tokens"]
        total = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        return Loss(total, total.new_tensor(tokens[:, 1:].numel()))


class AllLogits(Text):
    """Our model with the loss of all its logits at once, to see what the loss in pieces changes."""

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        tokens = batch["tokens"]
        total = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="sum")
        return Loss(total, total.new_tensor(tokens[:, 1:].numel()))


def ours(name: str, sizes: Mapping[str, Any]) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(**sizes, mechanism=OURS[name], positions="rotary")


def plain(sizes: Mapping[str, int]) -> PlainGPT:
    torch.manual_seed(0)
    return PlainGPT(**sizes)


def check(device: str, sizes: Mapping[str, int]) -> Figures:
    """The plain model with our weights: the same loss and the same gradients, in float32."""
    model = ours("softmax", sizes).to(device)
    other = PlainGPT(**sizes).to(device).copy(model)
    tokens = torch.randint(sizes["vocab"], (2, 200), device=device)
    expected = model.loss(tokens)
    loss = F.cross_entropy(other(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    expected.backward()
    loss.backward()
    wrong = 0.0
    for theirs, mine in other._pairs(model):
        for a, b in zip(theirs.parameters(), mine.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            wrong = max(wrong, float((a.grad - b.grad).norm() / b.grad.norm()))
    return {"loss": abs(float(loss.detach() - expected.detach())), "gradient": wrong}


def training_step(name: str, mode: str, length: int, tokens: int, sizes: Mapping[str, int], device: str) -> Iteration:
    """`name` with the loss on `tokens` tokens, in windows of `length`."""
    model: nn.Module = (plain(sizes) if name == "plain" else ours(name.removesuffix(ALL_LOGITS), sizes)).to(device)
    kind = PlainText if name == "plain" else AllLogits if name.endswith(ALL_LOGITS) else Text
    task = kind(length=length)
    batch = {"tokens": torch.randint(sizes["vocab"], (tokens // length, length + 1), device=device)}
    batch["first"] = torch.zeros(len(batch["tokens"]), dtype=torch.int64, device=device)
    if mode == "compiled":
        model.compile()
    if mode == "blocks":
        for block in (model if isinstance(model, PlainGPT) else model.transformer).blocks:  # type: ignore[union-attr]
            block.compile()
    precision = "bf16" if device == "cuda" else "fp32"
    return Iteration(task, model, batch, precision=precision, compile=mode == "step")


def peak(make: Callable[[], Iteration]) -> int | None:
    """The most bytes that a training step holds."""
    if not torch.cuda.is_available():
        return None
    run = make()
    for count in range(3):
        if count == 1:
            torch.cuda.reset_peak_memory_stats()
        run()
    return torch.cuda.max_memory_allocated()


def train(
    names: Sequence[str], device: str, sizes: Mapping[str, int], lengths: Sequence[int], tokens: int,
    modes: Sequence[str],
) -> Found:  # fmt: skip
    same = check(device, sizes)
    print(f"the plain model beside ours: {same}", flush=True)
    yield "check", same
    yield "tokens", tokens
    for length in lengths:
        for mode in modes:
            key = f"T = {length}, {mode}"
            some = ("plain", *names, *(["softmax" + ALL_LOGITS] if "softmax" in names else []))
            makers = {name: partial(training_step, name, mode, length, tokens, sizes, device) for name in some}
            try:
                rows = iterations(makers, on_line=partial(print, flush=True))
                for name, row in rows.items():
                    tidy(compiled=False)
                    row["peak_bytes"] = peak(makers[name]) if mode == "eager" else None
                    ratio, ms = row["ratio"]["median"], row["iteration_ms"]["median"]
                    print(f"{key:24s} {name:19s} {ms:9.2f} ms {ratio:6.3f} of plain, {row['peak_bytes']}", flush=True)
                yield key, rows
            except Exception as error:
                yield key, failed(error)
            tidy()


def middle(run: Callable[[], Any], device: str) -> float:
    """The median of three calls after one that is not timed."""
    run()
    return statistics.median(once(run, device) / 1000 for _ in range(3))


def decode(
    names: Sequence[str], device: str, sizes: Mapping[str, int], prompt: int, batches: Sequence[int], steps: int
) -> Found:
    """Milliseconds a token of `generate` after a prompt, and what a call costs beyond its prompt and steps."""
    yield "prompt", prompt
    for name in names:
        model = ours(name, sizes).to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()
        for batch in batches:
            tokens = torch.randint(sizes["vocab"], (batch, prompt), device=device)
            key = f"{name}, batch {batch}"
            try:
                calls = [partial(model.generate, tokens, count, seed=1) for count in (steps, 3 * steps)]
                first = once(calls[0], device) / 1000
                with torch.no_grad():
                    reading = middle(partial(model.prefill, tokens), device)
                short, long = (middle(call, device) for call in calls)
                step = (long - short) / (2 * steps)
                row = {
                    "ms_per_step": 1000 * step,
                    "tokens_per_second": batch / step,
                    "prompt_ms": 1000 * reading,
                    "first_call_ms": 1000 * first,
                    "second_call_beyond_prompt_and_steps_ms": 1000 * (short - reading - steps * step),
                }
                print(f"decode {key:24s} " + ", ".join(f"{k} {v:.3f}" for k, v in row.items()), flush=True)
                yield key, row
            except Exception as error:
                yield key, failed(error)
            tidy()


class MadeUp(Classification):
    """Random bytes and labels, for the speed of training alone."""

    name = "made-up"
    classes = 10
    length = 1024
    examples = 4096

    @classmethod
    def of(cls, length: int, examples: int) -> "MadeUp":
        task = cls()
        task.length, task.examples = length, examples
        return task

    def make_model(self, fields: Mapping[str, Any]) -> nn.Module:
        return Classifier(vocab=self.vocab, classes=self.classes, max_length=self.length, **fields)

    def source(self, split: Split) -> Source:  # noqa: ARG002
        draw = np.random.default_rng(0)
        tokens = draw.integers(0, 256, (self.examples, self.length), dtype=np.uint8)
        return Labelled(tokens, draw.integers(0, self.classes, self.examples))


def classifier(names: Sequence[str], device: str, length: int, fields: Mapping[str, int], steps: int) -> Found:
    """Steps a second of the trainer, whole: data, forward, backward, clipping, update."""
    yield "length", length
    yield "model", dict(fields)
    task = MadeUp.of(length, 128 if device == "cpu" else 4096)
    for name in (name for name in ("linear", "softmax") if name in names):
        for batch in (32, 128):
            key = f"{name}, batch {batch}"
            points: list[tuple[int, float]] = []
            training = TrainingConfig(steps=steps, batch=batch, log_every=max(1, steps // 10), capture=device == "cuda")

            def watch(step: int, _: float, points: list[tuple[int, float]] = points) -> None:
                points.append((step, time.perf_counter()))

            try:
                options = {"mechanism": name, "positions": "learned", **fields}
                learn(task, options, training, device=device, examples=batch, watch=watch)
                (first, begun), (last, ended) = points[len(points) // 2], points[-1]
                rate = (last - first) / (ended - begun)
                print(f"classifier {key:24s} {rate:.1f} steps/s", flush=True)
                yield key, {"steps_per_second": rate, "precision": training.precision}
            except Exception as error:
                yield key, failed(error)
            tidy()


def failed(error: Exception) -> Figures:
    traceback.print_exc()
    return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def tidy(compiled: bool = True) -> None:
    """Free memory, and with `compiled` also compiled code."""
    gc.collect()
    if compiled:
        torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sections", default="train,decode,classifier")
    parser.add_argument("--modes", default="eager,compiled", help=f"any of {', '.join(MODES)}")
    parser.add_argument("--lengths", default="1024,8192,32768")
    parser.add_argument("--names", default=",".join(OURS), help=f"any of {', '.join(OURS)}")
    parser.add_argument("--batches", default="1,256", help="of decoding")
    parser.add_argument("--commit", help="commit of the measured code, if git does not know it")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    tell_commit(given.commit)
    modes, lengths = given.modes.split(","), [int(n) for n in given.lengths.split(",")]
    names = given.names.split(",")
    for option, some, accepted in (("--modes", modes, MODES), ("--names", names, OURS)):
        if unknown := set(some) - set(accepted):
            parser.error(f"{option} has {', '.join(sorted(unknown))}: accepted are {', '.join(accepted)}")
    if given.tiny:
        device, sizes, lengths, tokens, prompt, steps = "cpu", TINY, [64], 128, 20, 20
    else:
        device, sizes, tokens, prompt, steps = "cuda", GPT2_SMALL, TOKENS, 4096, 256
    batches = [1, 2] if given.tiny else [int(n) for n in given.batches.split(",")]
    small = {"dim": 16, "depth": 1, "heads": 2} if given.tiny else {"dim": 128, "depth": 4, "heads": 4}
    sections: dict[str, Callable[[], Found]] = {
        "train": partial(train, names, device, sizes, lengths, tokens, modes),
        "decode": partial(decode, names, device, sizes, prompt, batches, steps),
        "classifier": partial(classifier, names, device, 64 if given.tiny else 1024, small, 20 if given.tiny else 2000),
    }
    if unknown := set(given.sections.split(",")) - sections.keys():
        parser.error(f"--sections has {', '.join(sorted(unknown))}: accepted are {', '.join(sections)}")
    path = given.out / "whole_models.json"
    figures: Figures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"kind": "whole models"}
    figures |= {"machine": machine(device), "model": dict(sizes), "bars (must, goal)": BARS}
    for name in given.sections.split(","):
        for key, found in sections[name]():
            figures.setdefault(name, {})[key] = found
            figures.setdefault("commits", {})[f"{name}, {key}"] = commit()
            save(figures, path)


if __name__ == "__main__":
    main()
