"""What a student has kept and what it costs, beside its teacher: perplexity, decoding, bytes of state, answers."""

import copy
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from subquad.checks import at_least, check_count, refuse
from subquad.graphs import recording
from subquad.hf.linearise.learn import perplexity, switched_off
from subquad.hf.linearise.models import Teacher, replaced
from subquad.hf.linearise.settings import LineariseSettings
from subquad.hf.replace import MixerLayer, replace
from subquad.machine import origin
from subquad.measure.cost import out_of_memory
from subquad.models.state import map_state
from subquad.training.precision import Precision

PIECE = 1024  # tokens of a prompt that are read at once
PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea in winter.",
    "Name three animals that live in the desert and say how each one finds water.",
    "Give me a recipe for pancakes.",
    "What is the difference between a comet and an asteroid?",
    "Write a polite letter to a neighbour whose dog barks at night.",
    "Continue the story: The old house at the end of the lane had been empty for years, until one evening",
    "Count from one to ten in words.",
    "Anna has a red coat and a blue hat. Ben has a green coat. What colour is Anna's coat?",
)


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What is measured; nothing of it affects what is learned."""

    lengths: tuple[int, ...] = (1024, 8192, 32768)  # of the text read before decoding
    batch: int = 1
    steps: int = 16  # of decoding, for each figure
    prompts: tuple[str, ...] = PROMPTS
    new_tokens: int = 40

    def __post_init__(self) -> None:
        at_least(self, batch=1, steps=1, new_tokens=1)
        for length in self.lengths:
            check_count("lengths", length)
        if not all(isinstance(prompt, str) and prompt.strip() for prompt in self.prompts):
            refuse("prompts", self.prompts, "texts")


def measure(
    teacher: Teacher,
    folder: Path,
    test: Tensor,
    settings: LineariseSettings,
    measures: Measures,
    device: torch.device,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The figures of the student in a folder, beside its teacher, whose weights may change type."""
    precision = Precision("auto" if device.type == "cpu" else "bf16", device)
    student = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    layers, test = replaced(student), test.to(device)
    window = settings.window or settings.compare_window
    say("measuring perplexity")
    values: dict[str, Any] = {"rows": len(test), "length": test.shape[1], "window": window}
    values["teacher"] = perplexity(teacher.model, test, precision, settings.distil_batch)
    values["student"] = perplexity(student, test, precision, settings.distil_batch)
    if settings.rule != "window":
        with switched_off(layers):
            values["linear part off"] = perplexity(student, test, precision, settings.distil_batch)
    local = copy.deepcopy(teacher.model)
    replace(local, sorted(layers), "local", window=window - 1)
    values["window only, untrained"] = perplexity(local, test, precision, settings.distil_batch)
    del local
    kind = teacher.dtype if device.type == "cuda" else torch.float32
    models = {"teacher": teacher.model.to(kind), "student": student.to(kind)}
    rows = []
    for length in measures.lengths:
        say(f"measuring decoding behind {length:,} tokens")
        row: dict[str, Any] = {"length": length, "batch": measures.batch, "type": str(kind).removeprefix("torch.")}
        row |= {name: decoding(model, length, measures, device) for name, model in models.items()}
        rows.append(row)
    say("answering prompts")
    answers = [
        {"prompt": prompt, **{name: answer(m, teacher.tokenizer, prompt, measures) for name, m in models.items()}}
        for prompt in measures.prompts
    ]
    return {**origin(str(device)), "perplexity": values, "decoding": rows, "answers": answers}


@torch.no_grad()
def decoding(model: Any, length: int, measures: Measures, device: torch.device) -> dict[str, Any]:
    """Seconds of a decoding step behind a prompt, and the bytes of the cache; on a GPU also as a CUDA graph."""
    try:
        return _decoding(model, length, measures, device)
    except (RuntimeError, MemoryError) as error:
        amount = out_of_memory(error)
        if amount is None:
            raise
        return {"failed": f"not enough memory: {amount}"}
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _decoding(model: Any, length: int, measures: Measures, device: torch.device) -> dict[str, Any]:
    vocab = model.get_input_embeddings().num_embeddings
    prompt = torch.randint(vocab, (measures.batch, length), generator=torch.Generator().manual_seed(1)).to(device)
    cache = DynamicCache(config=model.config)
    begun = now(device)
    for piece in prompt.split(PIECE, 1):
        token = model(piece, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
    reading = now(device) - begun
    times = []
    for turn in range(measures.steps + 3):
        begun = now(device)
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        if turn >= 3:  # the first ones compile
            times.append(now(device) - begun)
    linear, softmax = state_bytes(cache)
    figures = {
        "read_s": reading, "step_s": median(times), "tokens_per_second": measures.batch / median(times),
        "linear_state_bytes": linear, "softmax_state_bytes": softmax,
    }  # fmt: skip
    if device.type == "cuda":
        figures |= _graph(model, cache, token, measures)
    return figures


def _graph(model: Any, cache: DynamicCache, token: Tensor, measures: Measures) -> dict[str, Any]:
    """The same step in a CUDA graph, without the time that Python takes."""
    before = [vars(layer).copy() for layer in cache.layers]  # what the graph reads must stay
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with recording(graph):
            model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
    except RuntimeError as error:
        if out_of_memory(error) is not None:
            raise
        return {"graph_failed": str(error).partition("\n")[0]}
    times = []
    for _ in range(measures.steps):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    del before
    return {"graph_step_s": median(times), "graph_tokens_per_second": measures.batch / median(times)}


def state_bytes(cache: DynamicCache) -> tuple[int, int]:
    """Bytes of the states of replaced layers, and of the keys and values of the others."""
    linear = softmax = 0
    for layer in cache.layers:
        if isinstance(layer, MixerLayer):
            sizes: list[int] = []
            map_state(lambda t, sizes=sizes: sizes.append(t.nbytes) or t, layer.state)
            linear += sum(sizes)
        else:
            softmax += layer.keys.nbytes + layer.values.nbytes
    return linear, softmax


@torch.no_grad()
def answer(model: Any, tokenizer: Any, prompt: str, measures: Measures) -> str:
    """What the model writes, always the most probable token; as a chat if the tokenizer has a template for one."""
    if getattr(tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]], device=model.device)
    end = tokenizer.eos_token_id
    written = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=measures.new_tokens, do_sample=False, pad_token_id=end,
    )  # fmt: skip
    return str(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True))


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
