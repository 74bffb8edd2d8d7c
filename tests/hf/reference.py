"""Tiny models of Hugging Face with random weights, and their own eager attention under a pattern's dense mask."""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from subquad.ops import Pattern

VOCAB = 50
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
SPECIAL = {key: SMALL[key] for key in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
UNGROUPED = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
WINDOW = {"sliding_window": 9, "head_dim": 8}
MIXED = {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "initializer_range": 0.3}
DROPS_OF_GPT2 = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
DROPS_OF_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": None, "query_pre_attn_scalar": 8}
EXPERTS = {
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SMALL),
    "mistral": lambda: MistralConfig(**SMALL, **WINDOW),
    "qwen2": lambda: Qwen2Config(**SMALL, **WINDOW, **MIXED),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=16),
    "gpt2": lambda: GPT2Config(**SPECIAL, **GPT2, **DROPS_OF_GPT2),
    "gemma2": lambda: Gemma2Config(**SMALL, **WINDOW, **CAPS),
    "gpt_oss": lambda: GptOssConfig(**SMALL, **WINDOW, **EXPERTS),
    "bert_decoder": lambda: BertConfig(**UNGROUPED, **DROPS_OF_BERT, is_decoder=True),
}


def pair(kind: str, name: str, seed: int = 0, eager: str = "eager", **changes: Any) -> tuple[Any, Any]:
    """The same model with our attention and with theirs."""
    torch.manual_seed(seed)
    config, same = CONFIGS[kind](), CONFIGS[kind]()
    config.update(changes)
    same.update(changes)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation=eager).eval()
    if kind == "gpt_oss":
        with torch.no_grad():
            for layer in theirs.model.layers:
                layer.self_attn.sinks.normal_()
    ours = AutoModelForCausalLM.from_config(same, attn_implementation=name).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def positions(real: Tensor) -> Tensor:
    """Positions of the tokens of each row, without its padding."""
    return (real.long().cumsum(1) - 1).clamp(min=0)


def dense(pattern: Pattern, real: Tensor, window: int | None = None, causal: bool = True) -> Tensor:
    """The additive mask [B, 1, T, T] of a pattern over the tokens of each row."""
    at = positions(real)
    allowed = []
    for row, tokens in zip(at, real.bool(), strict=True):
        i, j = row[:, None], row[None]
        length = int(tokens.sum())
        one = pattern.dense(length, causal=causal)[i, j]  # [T, T]
        if window is not None:
            one &= (i - j < window) if causal else (i - j).abs() <= window
        allowed.append(one & tokens)
    mask = torch.stack(allowed)[:, None]
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


def masks(model: Any, pattern: Pattern, real: Tensor) -> Any:
    """What their eager attention takes as attention_mask: one mask, or one for each kind of layer."""
    window = getattr(model.config, "sliding_window", None)
    kinds = getattr(model.config, "layer_types", None)
    if kinds is None:
        return dense(pattern, real, window)
    return {kind: dense(pattern, real, window if kind == "sliding_attention" else None) for kind in sorted(set(kinds))}


def eager(model: Any, tokens: Tensor, pattern: Pattern, real: Tensor) -> Tensor:
    """Logits of their model under the pattern, without a cache."""
    out = model(tokens, attention_mask=masks(model, pattern, real), position_ids=positions(real), use_cache=False)
    return out.logits


def draw(batch: int, length: int, side: str, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens, also in the padding, and the padding mask, with one whole row."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCAB, (batch, length), generator=generator)
    real = torch.ones(batch, length, dtype=torch.long)
    if side != "none":
        for b in range(1, batch):
            missing = int(torch.randint(1, length - 2, (1,), generator=generator))
            real[b, slice(0, missing) if side == "left" else slice(length - missing, length)] = 0
    return tokens, real


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * max(1.0, float(b.detach().abs().max())))
