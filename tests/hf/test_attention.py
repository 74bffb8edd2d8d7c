"""Our patterns in their models equal their eager attention under the pattern's dense mask."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AttentionMaskInterface,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    DataCollatorWithFlattening,
    DynamicCache,
    StaticCache,
    T5Config,
    ViTConfig,
)
from transformers.models.t5 import modeling_t5

import subquad.hf
from subquad.hf import attention, masks
from subquad.ops import Block, Dense, Dilated, Global, Local, Pattern, Random, Strided, Summary
from tests.hf.reference import CONFIGS, DROPS_OF_BERT, UNGROUPED, VOCAB, close, dense, draw, eager, pair, positions

PATTERNS: list[Pattern] = [
    Local(4) | Global(2),
    Strided(4) | Local(3, 0),
    Block(8) | Summary(8, 2),
    Dilated(3, 2) | Random(1, 4),
    Dense(),
    Local(6, 0),
]
NAMES = [subquad.hf.register(pattern) for pattern in PATTERNS]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of these tests span several blocks of queries."""
    monkeypatch.setattr(attention, "ROWS", 16)


def twins(kind: Any, config: Any, name: str) -> tuple[Any, Any]:
    """The same model with our attention and with theirs."""
    torch.manual_seed(0)
    theirs = kind.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = kind.from_config(copy.deepcopy(config), attn_implementation=name).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def test_names() -> None:
    assert NAMES[0] == "subquad_local_4_4_global_2"
    assert len(set(NAMES)) == len(NAMES)
    with pytest.raises(ValueError, match="pattern"):
        subquad.hf.register("local")


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_values_and_gradients(kind: str, side: str) -> None:
    """Garbage stands in the padding."""
    for pattern, name in zip(PATTERNS, NAMES, strict=True):
        ours, theirs = pair(kind, name, seed=len(name))
        tokens, real = draw(3, 37, side, seed=5)
        results = []
        for model, logits in (
            (ours, ours(tokens, attention_mask=real, position_ids=positions(real)).logits),
            (theirs, eager(theirs, tokens, pattern, real)),
        ):
            logits = logits[real.bool()]
            logits.square().mean().backward()
            results.append((logits, {key: p.grad for key, p in model.named_parameters()}))
        close(results[0][0], results[1][0])
        for key, grad in results[1][1].items():
            if grad is None:
                assert results[0][1][key] is None
            else:
                close(results[0][1][key], grad)


def greedy(model: Any, tokens: Tensor, real: Tensor, pattern: Pattern, steps: int) -> Tensor:
    """New tokens by computing everything again at each step, for the row alone."""
    rows = []
    for row, mask in zip(tokens, real.bool(), strict=True):
        row = row[mask][None]
        start = row.shape[1]
        for _ in range(steps):
            logits = eager(model, row, pattern, torch.ones_like(row))
            row = torch.cat((row, logits[:, -1:].argmax(-1)), 1)
        rows.append(row[0, start:])
    return torch.stack(rows)


def stepwise(model: Any, tokens: Tensor, real: Tensor, cache: Any, steps: int) -> Tensor:
    """Greedy decoding after a right-padded prompt, whose padding stays in the cache."""
    at, new = positions(real), []
    logits = model(tokens, attention_mask=real, position_ids=at, past_key_values=cache).logits
    token = logits[torch.arange(len(tokens)), real.sum(1) - 1].argmax(-1)
    for n in range(steps):
        new.append(token)
        real = torch.cat((real, torch.ones_like(real[:, :1])), 1)
        where = positions(real)[:, -1:]
        if n < steps - 1:
            logits = model(token[:, None], attention_mask=real, position_ids=where, past_key_values=cache).logits
            token = logits[:, -1].argmax(-1)
    return torch.stack(new, 1)


@pytest.mark.parametrize("kind", CONFIGS)
def test_generation_is_token_equal(kind: str) -> None:
    """13 random cases for each of 8 models: pattern, padding, cache and length."""
    generator = torch.Generator().manual_seed(sum(map(ord, kind)))

    def pick(choices: int) -> int:
        return int(torch.randint(choices, (1,), generator=generator))

    for case in range(13):
        which, side, kept = pick(len(PATTERNS)), ("none", "left", "right")[pick(3)], ("dynamic", "static")[pick(2)]
        ours, theirs = pair(kind, NAMES[which], seed=case)
        tokens, real = draw(2, 4 + pick(24), side, seed=case)
        with torch.no_grad():
            wanted = greedy(theirs, tokens, real, PATTERNS[which], 8)
            if side == "right":
                size = tokens.shape[1] + 8
                cache = DynamicCache() if kept == "dynamic" else None
                if cache is None:
                    full = CONFIGS["llama"]()  # a cache without windows: padding between the tokens takes its place
                    full.head_dim = getattr(ours.config, "head_dim", None)
                    cache = StaticCache(config=full, max_cache_len=size)
                got = stepwise(ours, tokens, real, cache, 8)
            else:
                how = {"cache_implementation": "static"} if kept == "static" else {}
                got = ours.generate(tokens, attention_mask=real, max_new_tokens=8, do_sample=False, **how)
                got = got[:, tokens.shape[1] :]
        assert got.tolist() == wanted.tolist(), f"case {case}: {PATTERNS[which]}, {side}, {kept}"


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("static", [False, True])
def test_a_prompt_in_pieces(kind: str, static: bool) -> None:
    """Many tokens after a cache, and a few, with left padding and without: the logits of the prompt as a whole."""
    for n, (pattern, name) in enumerate(zip(PATTERNS, NAMES, strict=True)):
        ours, theirs = pair(kind, name)
        tokens, real = draw(3, 70, ("left", "none")[n % 2], seed=2)
        cache = StaticCache(config=ours.config, max_cache_len=80) if static else DynamicCache(config=ours.config)
        parts, start = [], 0
        with torch.no_grad():
            for size in (21, 30, 5, 1, 13):
                part = slice(start, start + size)
                at = positions(real)[:, part]
                start += size
                how = {"attention_mask": real[:, :start], "position_ids": at} if n % 2 == 0 else {}
                parts.append(ours(tokens[:, part], past_key_values=cache, **how).logits)
            wanted = eager(theirs, tokens, pattern, real)
        close(torch.cat(parts, 1)[real.bool()], wanted[real.bool()])


def test_beams_and_samples() -> None:
    ours, _ = pair("llama", NAMES[0])
    tokens, real = draw(2, 9, "left", seed=3)
    how = {"attention_mask": real, "max_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        with_cache = ours.generate(tokens, num_beams=3, use_cache=True, **how)
        without = ours.generate(tokens, num_beams=3, use_cache=False, **how)
    assert with_cache.tolist() == without.tolist()


def test_assisted_decoding() -> None:
    """Several tokens at once after a cache, some of which are taken back."""
    ours, _ = pair("llama", NAMES[0])
    tokens, _ = draw(1, 12, "none", seed=3)
    tokens = torch.cat((tokens, tokens, tokens), 1)
    with torch.no_grad():
        plain = ours.generate(tokens, max_new_tokens=12, do_sample=False)
        assisted = ours.generate(tokens, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=4)
    assert assisted.tolist() == plain.tolist()


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_16_bits(kind: str) -> None:
    """At most twice the error of their eager attention, in a prompt, in pieces after a cache and token by token."""
    for pattern, name in zip(PATTERNS[:3], NAMES[:3], strict=True):
        ours, theirs = pair(kind, name)
        tokens, real = draw(2, 48, "left", seed=7)
        keep = real[:, -20:].bool()
        with torch.no_grad():
            exact = eager(theirs, tokens, pattern, real)[:, -20:][keep]
            ours, theirs = ours.bfloat16(), theirs.bfloat16()
            rounded = eager(theirs, tokens, pattern, real)[:, -20:][keep]
            allowed = 2 * (rounded.float() - exact).abs().mean() + 1e-6
            for parts in ((48,), (28, 20), (28, 4, *[1] * 16)):
                cache, start, logits = DynamicCache(config=ours.config), 0, []
                for size in parts:
                    part = slice(start, start + size)
                    start += size
                    how = {"attention_mask": real[:, :start], "position_ids": positions(real)[:, part]}
                    logits.append(ours(tokens[:, part], past_key_values=cache, **how).logits)
                error = (torch.cat(logits, 1)[:, -20:][keep].float() - exact).abs().mean()
                assert error <= allowed


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gemma2"])
def test_packed_sequences(kind: str) -> None:
    """position_ids that start again at 0 mark sequences, which do not see one another."""
    for pattern, name in zip(PATTERNS, NAMES, strict=True):
        ours, theirs = pair(kind, name)
        tokens, _ = draw(2, 40, "none", seed=4)
        sizes = ((11, 1, 28), (23, 17))
        at = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in sizes])
        packed = ours(tokens, position_ids=at, use_cache=False).logits
        for row, own, logits in zip(tokens, sizes, packed, strict=True):
            for part, got in zip(row.split(own), logits.split(own), strict=True):
                close(got, eager(theirs, part[None], pattern, torch.ones(1, len(part)))[0])
        packed.square().mean().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in ours.parameters())


def test_cu_seqlens_alone_are_refused() -> None:
    ours, _ = pair("llama", NAMES[0])
    tokens, _ = draw(1, 12, "none", seed=4)
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    kernels = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": 7}
    with pytest.raises(ValueError, match=r"cu_seq_lens or seq_idx alone: mark packed sequences by position_ids"):
        ours(tokens, **kernels)
    at = torch.cat((torch.arange(5), torch.arange(7)))[None]
    how = {"position_ids": at, "use_cache": False}
    assert torch.equal(ours(tokens, **how, **kernels).logits, ours(tokens, **how).logits)
    for also in ({"use_cache": True}, {"attention_mask": torch.ones_like(tokens)}):
        with pytest.raises(ValueError, match="packed sequences: pass neither attention_mask nor a cache"):
            ours(tokens, **how | also)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch.compile, after a graph break
def test_a_pack_of_one_sequence() -> None:
    """As the last batch of a collator may be; compiled models mark it as packed."""
    ours, _ = pair("llama", NAMES[0])
    tokens, _ = draw(1, 12, "none", seed=4)
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = dict(collate([{"input_ids": tokens[0].tolist()}])) | {"labels": None}
    for model in (ours, torch.compile(ours, backend="eager")):
        close(model(**batch, use_cache=False).logits, ours(tokens).logits)


def test_segments_are_read_only_if_there_are_several() -> None:
    pattern, device = PATTERNS[0], torch.device("cpu")
    for size in (1, 5, 40):
        shape, none = (3, 1, size, size), torch.zeros(1, size, dtype=torch.int64)
        plain, same = (
            masks.make_mask(pattern, masks.Form(True, None, segments), shape, 0, 0, None, device)
            for segments in (None, none)
        )
        assert not same.packed
        assert str(same) == str(plain)
    some = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]])
    mask = masks.make_mask(pattern, masks.Form(True, None, some), (2, 1, 5, 5), 0, 0, None, device)
    assert mask.packed
    assert mask.sequences is not None
    assert mask.sequences.lengths.tolist() == [5, 3, 2]
    assert mask.sequences.place.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 1]]


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_bert(side: str) -> None:
    for pattern, name in zip(PATTERNS, NAMES, strict=True):
        ours, theirs = twins(AutoModelForMaskedLM, BertConfig(**UNGROUPED, **DROPS_OF_BERT), name)
        tokens, real = draw(3, 45, side, seed=6)
        got = ours(tokens, attention_mask=real).logits[real.bool()]
        wanted = theirs(tokens, attention_mask=dense(pattern, real, causal=False)).logits[real.bool()]
        close(got, wanted)
        got.square().mean().backward(), wanted.square().mean().backward()
        grads = [[p.grad for p in model.parameters() if p.grad is not None] for model in (ours, theirs)]
        for a, b in zip(*grads, strict=True):
            close(a, b)


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_t5(side: str) -> None:
    """Biases of the scores; the cross-attention stays dense."""
    for pattern, name in zip(PATTERNS, NAMES, strict=True):
        config = T5Config(
            vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, pad_token_id=0,
            eos_token_id=None, decoder_start_token_id=1, relative_attention_num_buckets=8,
        )  # fmt: skip
        ours, theirs = twins(AutoModelForSeq2SeqLM, config, name)
        source, real = draw(3, 33, side, seed=7)
        target, _ = draw(3, 33, "none", seed=8)
        if not hasattr(modeling_t5, "ALL_ATTENTION_FUNCTIONS"):
            with pytest.raises(TypeError, match="a model that computes its own attention, as T5 did"):
                ours(source, attention_mask=real, decoder_input_ids=target)
            return
        got = ours(source, attention_mask=real, decoder_input_ids=target).logits
        memory = theirs.encoder(source, attention_mask=dense(pattern, real, causal=False))
        wanted = theirs(
            encoder_outputs=memory,
            attention_mask=real,
            decoder_input_ids=target,
            decoder_attention_mask=dense(pattern, torch.ones_like(target)),
        ).logits
        close(got, wanted)
        got.square().mean().backward(), wanted.square().mean().backward()
        for (key, p), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert p.grad is not None, key
            close(p.grad, other.grad)
        with torch.no_grad():
            how = {"attention_mask": real, "max_new_tokens": 10, "do_sample": False}
            cached = ours.generate(source, **how)
            static = ours.generate(source, cache_implementation="static", **how)
            assert cached.tolist() == static.tolist() == ours.generate(source, use_cache=False, **how).tolist()


@pytest.mark.parametrize("kind", ["gpt2", "bert_decoder"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_cross_attention_stays_dense(kind: str, side: str) -> None:
    for pattern, name in zip(PATTERNS, NAMES, strict=True):
        config = CONFIGS[kind]()
        config.add_cross_attention = True
        ours, theirs = twins(AutoModelForCausalLM, config, name)
        tokens, whole = draw(3, 21, "none", seed=1)
        memory = torch.randn(3, 13, 32)
        real = draw(3, 13, side, seed=2)[1]
        for mask in (real, None):
            how = {"encoder_hidden_states": memory, "encoder_attention_mask": mask, "use_cache": False}
            close(ours(tokens, **how).logits, theirs(tokens, attention_mask=dense(pattern, whole), **how).logits)


def test_long_sequences_in_blocks_of_the_usual_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "ROWS", 256)
    for pattern, name in zip(PATTERNS[:3], NAMES[:3], strict=True):
        ours, theirs = pair("gemma2", name)
        tokens, real = draw(2, 400, "left", seed=5)
        with torch.no_grad():
            got = ours(tokens, attention_mask=real, position_ids=positions(real)).logits
            close(got[real.bool()], eager(theirs, tokens, pattern, real)[real.bool()])


def test_an_encoder_that_asks_for_no_mask() -> None:
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, image_size=24, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ours, theirs = twins(AutoModel, config, NAMES[4])
    image = torch.randn(2, 3, 24, 24)
    close(ours(image).last_hidden_state, theirs(image).last_hidden_state)


def test_nothing_in_the_padding_matters() -> None:
    """Not even NaN."""
    ours, _ = pair("gemma2", NAMES[0])
    for kind in ("gemma2", "llama", "gpt_oss"):
        ours, _ = pair(kind, NAMES[0])
        for side in ("left", "right"):
            tokens, real = draw(3, 20, side, seed=9)
            embedded = ours.get_input_embeddings()(tokens)
            at = positions(real)
            for value in (7.0, torch.nan):
                dirty = embedded.masked_fill(real[..., None] == 0, value)
                with torch.no_grad():
                    got = ours(inputs_embeds=dirty, attention_mask=real, position_ids=at).logits
                    wanted = ours(inputs_embeds=embedded, attention_mask=real, position_ids=at).logits
                assert torch.equal(got[real.bool()], wanted[real.bool()])


def test_dropout_drops_weights() -> None:
    """In training the mean over many draws is the output without dropout."""
    config = CONFIGS["gpt2"]()
    config.attn_pdrop = 0.5
    torch.manual_seed(0)
    model = AutoModel.from_config(config, attn_implementation=NAMES[0])
    layer = model.h[0].attn
    x, mask = torch.randn(1, 20, 32), masks.PatternMask((1, 1, 20, 20), True, used=20)
    with torch.no_grad():
        still = layer.eval()(x, attention_mask=mask)[0]
        layer.train()
        draws = torch.stack([layer(x, attention_mask=mask)[0] for _ in range(600)])
    assert not torch.allclose(draws[0], draws[1])
    assert (draws.mean(0) - still).abs().max() < 6 * draws.std(0).max() / 600**0.5


def test_masks_of_others_are_refused() -> None:
    ours, _ = pair("llama", NAMES[0])
    tokens, real = draw(2, 10, "left", seed=1)
    with pytest.raises(ValueError, match=r"LlamaAttention with a mask of its own, Tensor \[2, 1, 10, 10\]"):
        ours(tokens, attention_mask=dense(PATTERNS[0], real))
    with pytest.raises(ValueError, match='output_attentions: load the model with attn_implementation="eager"'):
        ours(tokens, output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions"):
        pair("gpt2", NAMES[0])[0](tokens, output_attentions=True)
    with pytest.raises(ValueError, match="the argument head_mask of LlamaAttention"):
        ours(tokens, head_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match="the argument lengths of LlamaAttention"):
        ours(tokens, lengths=torch.tensor([3, 4]))


def test_masks_of_the_models_own_are_refused() -> None:
    from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask

    ours, _ = pair("llama", NAMES[0])
    x = torch.randn(2, 10, 32)
    plain = {"config": ours.config, "inputs_embeds": x, "attention_mask": None, "past_key_values": None}
    with pytest.raises(ValueError, match="a mask of the model's or user's own"):
        create_causal_mask(**plain, or_mask_function=lambda *at: at[2] == at[3])
    with pytest.raises(ValueError, match="the mask or_masks of this model: accepted are causal, bidirectional"):
        create_causal_mask(**plain, block_sequence_ids=torch.zeros(2, 10, dtype=torch.long))
    ours.config.attention_chunk_size = 4
    with pytest.raises(ValueError, match="the mask chunked_overlay of this model"):
        create_chunked_causal_mask(**plain)


def test_without_the_mask_function_it_refuses_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    name = subquad.hf.register(Local(3))
    ours, _ = pair("llama", name)
    tokens, real = draw(2, 10, "left", seed=1)
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, name)
    with pytest.raises(RuntimeError, match="not in AttentionMaskInterface, so transformers drops every mask"):
        ours(tokens, attention_mask=real)


def test_a_causal_module_without_a_mask_is_refused() -> None:
    ours, _ = pair("llama", NAMES[0])
    x, at = torch.randn(1, 5, 32), torch.arange(5)[None]
    rotary = ours.model.rotary_emb(x, at)
    with pytest.raises(ValueError, match="LlamaAttention with no mask: pass attention_mask"):
        ours.model.layers[0].self_attn(x, position_embeddings=rotary)


def test_a_window_without_its_mask_is_refused() -> None:
    ours, _ = pair("llama", NAMES[0])
    mask = masks.PatternMask((1, 1, 5, 5), True, used=5)
    x, at = torch.randn(1, 5, 32), torch.arange(5)[None]
    rotary = ours.model.rotary_emb(x, at)
    with pytest.raises(ValueError, match="sliding_window=4 and a mask without a window"):
        ours.model.layers[0].self_attn(x, position_embeddings=rotary, attention_mask=mask, sliding_window=4)


def test_a_sliding_cache_with_padding_between_tokens_says_what_it_dropped() -> None:
    ours, _ = pair("mistral", NAMES[0])
    tokens, real = draw(2, 24, "right", seed=11)
    real[1, 6:] = 0
    with pytest.raises(ValueError, match="the cache has dropped keys that the pattern reads: pad on the left"):
        stepwise(ours, tokens, real, DynamicCache(config=ours.config), 3)


def test_decoding_compiles_whole() -> None:
    """As `generate` compiles it on a GPU: masks are made before, and the forward pass is one graph."""
    ours, theirs = pair("llama", NAMES[0], num_hidden_layers=1)
    tokens, real = draw(2, 12, "left", seed=2)
    cache = StaticCache(config=ours.config, max_cache_len=20)
    at = positions(real)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    with torch.no_grad():
        ours(tokens[:, :9], attention_mask=real[:, :9], position_ids=at[:, :9], past_key_values=cache)
        got = []
        for n in range(9, 12):
            inputs = ours.prepare_inputs_for_generation(
                tokens[:, n : n + 1], past_key_values=cache, attention_mask=real[:, : n + 1],
                position_ids=at[:, n : n + 1], next_sequence_length=1, use_cache=True,
            )  # fmt: skip
            assert isinstance(inputs["attention_mask"], masks.PatternMask)
            got.append(compiled(**inputs).logits)
        wanted = eager(theirs, tokens, PATTERNS[0], real)[:, 9:]
    close(torch.cat(got, 1), wanted)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch.compile, after a graph break
def test_training_under_compile() -> None:
    ours, _ = pair("llama", NAMES[0], num_hidden_layers=1)
    tokens, real = draw(2, 20, "left", seed=2)
    compiled = torch.compile(ours, backend="eager")
    for how in ({"attention_mask": real}, {}):
        close(compiled(tokens, **how).logits, ours(tokens, **how).logits)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")  # older ones know it only
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    ours, _ = pair("llama", NAMES[0])
    ours.enable_input_require_grads()  # without it, a re-entrant checkpoint of the first layer has no gradients
    tokens, real = draw(2, 20, "left", seed=2)
    grads = []
    for _ in range(2):
        ours.zero_grad()
        ours(tokens, attention_mask=real, labels=tokens).loss.backward()
        grads.append([p.grad.clone() for p in ours.parameters()])
        ours.train()
        ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for a, b in zip(*grads, strict=True):
        close(a, b)


def test_a_mask_moves() -> None:
    mask = masks.PatternMask((2, 1, 5, 5), True, used=5, sequences=masks.unpad(torch.ones(2, 5).bool(), 0, 5, 0))
    moved = mask.to("meta")
    assert moved.sequences is not None
    assert moved.sequences.slots.device.type == "meta"
    assert moved.ndim == 4
    assert moved.contiguous() is moved


def test_keys_read_are_those_of_the_pattern() -> None:
    """The cost of decoding: as many keys as the pattern has at that position, not the whole cache."""
    mask = masks.make_mask(
        Local(8, 0) | Global(2), masks.Form(True), (1, 1, 1, 5000), 4999, 0, None, torch.device("cpu")
    )
    assert mask.runs == ((0, 2), (4991, 5000))
    assert masks.runs_of([7, 0, 1, 5, 6]) == ((0, 2), (5, 8))
    assert masks.runs_of([]) == ()
    columns = attention.union(Local(8, 0) | Global(2), None, True, 4800, 4816, 5000, torch.device("cpu"))
    assert columns.tolist() == [0, 1, *range(4792, 4816)]
