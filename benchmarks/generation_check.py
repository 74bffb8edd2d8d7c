"""Checks before generation is timed: captured, laned, compiled and deferred steps must write what plain steps write.

If tokens are fed back, one rounding error that flips a draw changes the rest of an image and hides its cause. So the
loop is also run with a teacher: every stream reads given tokens, and its outputs are compared at every step. A fast
path may have at most twice the error of the plain loop, 16 bits against 32 and 32 against 64.
"""

import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subquad.models import LanguageModel, Seq2Seq
from subquad.models.decoding import Loop
from subquad.models.generation import generate
from subquad.models.streams import Streams
from subquad.studies.generation import Figures, make_loop, paper_model, run_steps

STACKS: tuple[Any, ...] = ("linear", "softmax", ("linear", "local"), "reformer", "sinkhorn", "performer", "mixed")
CROSS = ("softmax", "linear", "additive")
STEPS = 68  # enough for groups of steps in one graph, with some steps left over
PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8, 9]] * 11


class Teacher:
    """A head that records the outputs and the draws of each step, and dictates the next token.

    Seeds are 0, 1, ...: the rows of a batch, also within a lane.
    """

    def __init__(self, head: Any, tokens: Tensor, width: int, dtype: torch.dtype):
        self.head, self.values, self.tokens = head, head.values, tokens
        self.outputs = torch.zeros(*tokens.shape, width, dtype=dtype, device=tokens.device)  # [T, B, width]
        self.drawn = torch.zeros_like(tokens)  # [T, B]

    def draw(self, outputs: Tensor, sampling: Any, seeds: Tensor, position: Tensor, seen: Tensor | None) -> Tensor:
        at = position - 1, seeds
        self.outputs.index_put_(at, outputs)
        self.drawn.index_put_(at, self.head.draw(outputs, sampling, seeds, position, seen))
        return self.tokens[at]


def lead(model: Any, tokens: Tensor, plain: bool, device: str) -> tuple[Tensor, Tensor]:
    """(outputs [T, B, ...], draws [T, B]) of a loop that reads the given tokens [T, B]."""
    steps, batch = tokens.shape
    lanes = 2 if device == "cuda" and not plain else 1
    loop: Loop = make_loop(model, batch, steps, compile=not plain, lanes=lanes, unroll=1 if plain else 8)
    loop.capturing = loop.capturing and not plain
    loop.head = teacher = Teacher(loop.head, tokens, model.config.width, model.dtype)  # type: ignore[assignment]
    for _ in loop.advance(steps):
        pass
    return teacher.outputs.double(), teacher.drawn


def rounding(device: str, depth: int, steps: int, streams: int) -> Figures:
    """Compare the outputs of the fast and of the plain loop with the same model in a wider type."""
    found: Figures = {}
    for dtype, wide, batch in (
        (torch.bfloat16, torch.float32, streams),
        (torch.float32, torch.float64, max(1, streams // 16)),  # the fused feed-forward, for many rows, uses 16 bits
    ):
        model = paper_model("mnist", device=device, dtype=dtype, depth=depth)
        exact = paper_model("mnist", device=device, dtype=dtype, depth=depth).to(wide)
        tokens = run_steps(make_loop(exact, batch, steps), steps)
        wanted, chosen = lead(exact, tokens, True, device)
        row: Figures = {"layers": depth, "steps": steps, "streams": batch, "largest output": float(wanted.abs().max())}
        errors = {}
        drawn = {"wide": chosen}
        for name, plain in (("plain", True), ("fast", False)):
            outputs, drawn[name] = lead(model, tokens, plain, device)
            errors[name] = float((outputs - wanted).norm() / wanted.norm())
            apart = (drawn[name] - chosen).abs()
            row[name] = {
                "relative error": errors[name],
                "largest output difference": float((outputs - wanted).abs().max()),
                "draws that differ": float((apart > 0).double().mean()),
                "shades apart where they differ": float(apart[apart > 0].double().mean()) if apart.any() else 0.0,
            }
        row["draws of fast and plain that differ"] = float((drawn["fast"] != drawn["plain"]).double().mean())
        row["fast is at most twice as wrong as plain"] = errors["fast"] <= 2 * errors["plain"]
        found[f"{dtype} against {wide}".replace("torch.", "")] = row
        torch._dynamo.reset()
    return found


def noted(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        return run(), [str(note.message)[:200] for note in notes]


def one_by_one(model: Any, prompt: Any, steps: int, state: Any = None) -> Tensor:
    """The tokens of `generate` without a captured graph: one call per step."""
    out = generate(model, prompt, 1, seed=3, full=True, state=state)
    made = [out.tokens]
    for _ in range(steps - 1):
        out = generate(model, made[-1], 1, seed=3, full=True, state=out.state)
        made.append(out.tokens)
    return torch.cat(made, 1)


def compare(model: Any, prompt: Any, device: str, steps: int, start: Callable[[], Any] = lambda: None) -> Figures:
    """Compare the tokens of the captured loop, in one and in two lanes, with those of single steps and of the CPU."""
    here = model.generate(prompt, steps, seed=3, state=start())
    model.to(device)
    captured, notes = noted(lambda: model.generate(prompt, steps, seed=3, state=start()))
    laned = model.generate(prompt, steps, seed=3, state=start(), lanes=2)
    plain = one_by_one(model, prompt, steps, start())
    return {
        "captured equals plain": torch.equal(captured, plain),
        "lanes equal plain": torch.equal(laned, plain),
        "tokens equal to the CPU's": float((captured.cpu() == here.cpu()).double().mean()),
        "notes": notes,
    }


def stacks(device: str, steps: int) -> Figures:
    found = {}
    for mechanism in STACKS:
        torch.manual_seed(0)
        model = LanguageModel(vocab=40, dim=64, depth=2, heads=4, mechanism=mechanism).eval()
        name = mechanism if isinstance(mechanism, str) else "+".join(mechanism)
        found[name] = compare(model, PROMPTS, device, steps)
    for cross in CROSS:
        torch.manual_seed(0)
        pair = Seq2Seq(vocab=40, dim=64, depth=2, heads=4, mechanism="linear", cross=cross).eval()
        source, lengths = torch.randint(40, (33, 17)), torch.randint(1, 18, (33,))

        def start(model: Any = pair, source: Tensor = source, lengths: Tensor = lengths) -> Any:
            with torch.no_grad():
                return model.init_state(*model.encode(source.to(model.device), lengths.to(model.device)))

        found[f"linear with memories of {cross}"] = compare(pair, [[0]] * 33, device, steps, start)
    return found


def streams(device: str) -> Figures:
    """Check that streams which come and go in a running batch write the same as alone."""
    found: Figures = {}
    for mechanism in ("linear", "softmax"):
        torch.manual_seed(0)
        model = LanguageModel(vocab=40, dim=64, depth=2, heads=4, mechanism=mechanism).to(device).eval()
        server = Streams(model, slots=4, capacity=64)
        made: dict[int, list[int]] = {}
        prompts = {id: [id + 1, id + 2, 3] for id in range(7)}
        for count in (3, 1, 2, 1):
            first = server.next_id
            ids = server.admit(
                [prompts[id] for id in range(first, first + count)], seed=list(range(first, first + count))
            )
            made.update({id: [] for id in ids})
            for _ in range(12):
                for id, token in server.step().items():
                    made[id].append(token)
            for id in server.running[: max(0, 3 - server.free)]:
                server.retire(id)
        same = [model.generate(prompts[id], len(tokens), seed=id).tolist() == tokens for id, tokens in made.items()]
        found[mechanism] = {"streams": len(made), "streams equal to those alone": sum(same)}
    return found


def check(device: str = "cuda", depth: int = 4, steps: int = 128, batch: int = 8192) -> Figures:
    found: Figures = {}
    parts: dict[str, Callable[[], Figures]] = {
        "captured": lambda: stacks(device, min(steps, STEPS)),
        "streams": lambda: streams(device),
        "led by a teacher": lambda: rounding(device, depth, steps, batch),
    }
    for name, part in parts.items():
        try:
            found[name] = part()
        except Exception as error:
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        for what, row in found[name].items():
            print(f"check {what}: {row}", flush=True)
    return found
