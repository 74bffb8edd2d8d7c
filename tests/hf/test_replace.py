"""Attention modules of theirs replaced by mechanisms: copied, trained, generated with, saved and loaded."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    DynamicCache,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    EuroBertConfig,
    StaticCache,
    T5Config,
    Trainer,
    TrainingArguments,
)

import subquad.hf
from subquad.hf.replace import MixerLayer, Replacement
from subquad.mechanisms import MECHANISMS
from subquad.ops import Global, Local
from tests.hf.reference import CONFIGS, DROPS_OF_BERT, UNGROUPED, close, dense, draw, positions

KINDS = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
CAUSAL = [name for name, cls in MECHANISMS.items() if cls.traits.causal]


def made(kind: str, **changes: Any) -> Any:
    """A model of theirs without sliding windows."""
    config = CONFIGS[kind]()
    if hasattr(config, "sliding_window"):
        config.sliding_window = None
    if kind == "qwen2":
        config.layer_types = ["full_attention", "full_attention"]
    if kind == "qwen3":
        config.head_dim = 8
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def options_of(name: str) -> dict[str, Any]:
    small = dict(MECHANISMS[name].small[0])
    return small | ({"max_length": 64} if MECHANISMS[name].traits.fixed_length else {})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [None, [1]])
@pytest.mark.parametrize("how", [{"mechanism": "softmax"}, {"mechanism": "local", "window": 100}])
def test_an_exact_mechanism_changes_nothing(kind: str, layers: list[int] | None, how: dict[str, Any]) -> None:
    """Projections, grouped queries, rotary positions with their base, norms and scales are all kept."""
    theirs = made(kind)
    ours = copy.deepcopy(theirs)
    report = subquad.hf.replace(ours, layers=layers, **how)
    kept = ("q", "k", "v", "o", *(["norms"] if kind == "qwen3" else []), *(["rotary"] if kind != "gpt2" else []))
    assert report == dict.fromkeys(layers or [0, 1], kept)
    assert sum(isinstance(module, Replacement) for module in ours.modules()) == len(report)
    for side in ("none", "left", "right"):
        tokens, real = draw(3, 21, side, seed=1)
        with torch.no_grad():
            a, b = (m(tokens, attention_mask=real, position_ids=positions(real)).logits for m in (ours, theirs))
            close(a[real.bool()], b[real.bool()])
            if side != "right":
                new = {"attention_mask": real, "max_new_tokens": 6, "do_sample": False}
                wanted = theirs.generate(tokens, **new).tolist()
                assert ours.generate(tokens, **new).tolist() == wanted
                assert ours.generate(tokens, use_cache=False, **new).tolist() == wanted
                beams = [m.generate(tokens, num_beams=3, **new).tolist() for m in (ours, theirs)]
                assert beams[0] == beams[1]


def test_the_scale_of_scores_is_kept() -> None:
    theirs = made("gpt2", scale_attn_by_inverse_layer_idx=True)
    ours = copy.deepcopy(theirs)
    subquad.hf.replace(ours, mechanism="softmax")
    tokens, _ = draw(2, 20, "none", seed=2)
    close(ours(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_scaled_rotary_positions_are_kept(rope: str) -> None:
    parameters = {
        "linear": {"factor": 4.0},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    }[rope]
    theirs = made("llama", rope_parameters={"rope_type": rope, "rope_theta": 500.0, **parameters})
    ours = copy.deepcopy(theirs)
    subquad.hf.replace(ours, mechanism="softmax")
    tokens, _ = draw(2, 60, "none", seed=2)
    close(ours(tokens).logits, theirs(tokens).logits)


def test_rotary_positions_of_other_kinds_are_refused() -> None:
    model = made("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ValueError, match="of type 'dynamic' depends on the layer or the length: pass rotary=False"):
        subquad.hf.replace(model, mechanism="softmax")
    assert subquad.hf.replace(model, mechanism="softmax", rotary=False)[0] == ("q", "k", "v", "o")


def test_other_ways_of_rotating_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    model, theirs = made("llama"), modeling_llama.apply_rotary_pos_emb

    def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.arange(q.shape[-1]).view(2, -1).T.flatten()
        turned, _ = theirs(q[..., order.argsort()], k[..., order.argsort()], cos, sin)
        return turned[..., order], k

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", interleaved)
    with pytest.raises(ValueError, match="in another way than Llama's"):
        subquad.hf.replace(model, mechanism="softmax")


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bert(side: str, attention: str) -> None:
    config = BertConfig(**UNGROUPED, **DROPS_OF_BERT)
    torch.manual_seed(0)
    theirs = AutoModelForMaskedLM.from_config(config, attn_implementation=attention).eval()
    ours = copy.deepcopy(theirs)
    assert subquad.hf.replace(ours, mechanism="softmax") == dict.fromkeys([0, 1], ("q", "k", "v", "o"))
    tokens, real = draw(3, 21, side, seed=1)
    close(*(m(tokens, attention_mask=real).logits[real.bool()] for m in (ours, theirs)))
    linear = copy.deepcopy(theirs)
    subquad.hf.replace(linear, layers=[0], mechanism="linear")
    padded = linear(tokens, attention_mask=real).logits
    for row, mask, logits in zip(tokens, real.bool(), padded, strict=True):
        at = torch.arange(21)[mask][None]
        close(logits[mask], linear(row[mask][None], position_ids=at).logits[0])


@pytest.mark.parametrize("name", CAUSAL)
def test_every_causal_mechanism(name: str, tmp_path: Path) -> None:
    """Padding does not matter, generation with a cache equals generation without, and what is saved loads."""
    model = made("llama")
    subquad.hf.replace(model, layers=[1], mechanism=name, **options_of(name))
    model.eval()
    tokens, real = draw(2, 17, "left", seed=3)
    with torch.no_grad():
        new = {"attention_mask": real, "max_new_tokens": 5, "do_sample": False}
        without = model.generate(tokens, use_cache=False, **new)
        alone = [
            model.generate(row[mask.bool()][None], **new | {"attention_mask": None}, use_cache=False)[0, -5:]
            for row, mask in zip(tokens, real, strict=True)
        ]
        assert without[:, -5:].tolist() == torch.stack(alone).tolist()
        if model.model.layers[1].self_attn.mixer.traits.state is None:
            with pytest.raises(NotImplementedError, match="no recurrent form, so it keeps no cache"):
                model.generate(tokens, **new)
        else:
            assert model.generate(tokens, **new).tolist() == without.tolist()
        model.save_pretrained(tmp_path)
        loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info.values())
        assert loaded.config.subquad == model.config.subquad
        assert torch.equal(loaded(tokens, attention_mask=real).logits, model(tokens, attention_mask=real).logits)
        inner = AutoModel.from_pretrained(tmp_path)
        assert isinstance(inner.layers[1].self_attn, Replacement)


@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "bert"])
def test_other_models_load_again(kind: str, tmp_path: Path) -> None:
    if kind == "bert":
        model: Any = AutoModelForMaskedLM.from_config(BertConfig(**UNGROUPED, **DROPS_OF_BERT)).eval()
        auto, mechanism = AutoModelForMaskedLM, "performer"
    else:
        model, auto, mechanism = made(kind), AutoModelForCausalLM, "gated_deltanet"
    subquad.hf.replace(model, layers=[0], mechanism=mechanism)
    if kind != "bert":
        subquad.hf.replace(model, layers=[1], mechanism="linear")
        assert [part["mechanism"] for part in model.config.subquad["replaced"]] == ["gated_deltanet", "linear"]
    model.save_pretrained(tmp_path)
    loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    tokens, real = draw(2, 9, "left", seed=1)
    assert torch.equal(loaded(tokens, attention_mask=real).logits, model(tokens, attention_mask=real).logits)
    half = auto.from_pretrained(tmp_path, dtype=torch.bfloat16)
    logits = half(tokens, attention_mask=real).logits[real.bool()].float()
    wanted = model(tokens, attention_mask=real).logits[real.bool()]
    assert (logits - wanted).abs().max() < 0.1 * wanted.abs().max()


@pytest.mark.parametrize("name", ["mamba2", "routing", "performer", "bigbird"])
def test_buffers_load(name: str, tmp_path: Path) -> None:
    """Also those that a mechanism does not save by itself, in whose place transformers puts memory of any content."""
    model = made("llama")
    subquad.hf.replace(model, mechanism=name, **options_of(name))
    model.save_pretrained(tmp_path)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN or the largest integer
    try:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    kept = dict(loaded.named_buffers())
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, kept[key]), key


def test_embeddings_resize_and_stay_tied(tmp_path: Path) -> None:
    model = made("llama", tie_word_embeddings=True)
    subquad.hf.replace(model, mechanism="linear")
    model.resize_token_embeddings(60)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    tokens = torch.randint(60, (1, 9))
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_a_config_makes_the_replaced_model() -> None:
    model = made("llama")
    subquad.hf.replace(model, mechanism="linear")
    again = AutoModelForCausalLM.from_config(copy.deepcopy(model.config))
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
    json.dumps(model.config.to_dict())


def test_a_part_of_a_model(tmp_path: Path) -> None:
    """Each part has its own config, which makes its layers again."""
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    parts = [BertConfig(**sizes, intermediate_size=16) for _ in range(2)]
    model = EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(*parts)).eval()
    with pytest.raises(ValueError, match="EncoderDecoderModel has attention modules in parts with their own configs"):
        subquad.hf.replace(model, layers=[2])
    subquad.hf.replace(model.decoder, layers=[1], mechanism="linear")
    model.save_pretrained(tmp_path)
    again = EncoderDecoderModel.from_pretrained(tmp_path).eval()
    tokens = draw(2, 7, "none", seed=5)[0] % 20
    close(again(tokens, decoder_input_ids=tokens).logits, model(tokens, decoder_input_ids=tokens).logits)


def test_what_is_copied_depends_on_shapes() -> None:
    assert set(subquad.hf.replace(made("llama"), mechanism="gated_deltanet")[0]) == {"q", "k"}
    whole = subquad.hf.replace(made("llama"), mechanism="gated_deltanet", expand_v=1)
    assert set(whole[0]) == {"q", "k", "v", "o"}
    assert set(subquad.hf.replace(made("llama"), mechanism="linear", heads=2)[0]) == {"rotary"}
    assert set(subquad.hf.replace(made("qwen2"), mechanism="gla", key_width=8)[0]) == {"o"}  # theirs have biases
    wider = made("qwen3", head_dim=16)
    assert subquad.hf.replace(wider, mechanism="linear")[0] == ()
    encoder = AutoModel.from_config(EuroBertConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        mask_token_id=3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ))  # fmt: skip
    # its global tokens have projections of their own, which turn by themselves
    assert subquad.hf.replace(encoder, mechanism="longformer", global_tokens=1)[0] == ("q", "k", "v", "o")
    model = made("llama")
    theirs = model.model.layers[0].self_attn
    subquad.hf.replace(model, layers=[0], mechanism="gated_deltanet", expand_v=1)
    into = model.model.layers[0].self_attn.mixer.into.weight
    assert torch.equal(into[:32], theirs.q_proj.weight)
    assert torch.equal(into[32:64].view(4, 8, 32), theirs.k_proj.weight.view(2, 8, 32).repeat_interleave(2, 0))


def test_states_live_in_the_cache() -> None:
    """Beams reorder them, rows repeat and are selected, and a copy continues by itself."""
    model = made("llama")
    subquad.hf.replace(model, layers=[0], mechanism="linear")
    tokens, _ = draw(3, 11, "none", seed=4)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(tokens[:, :8], past_key_values=cache)
        assert isinstance(cache.layers[0], MixerLayer)
        assert not isinstance(cache.layers[1], MixerLayer)
        assert cache.get_seq_length() == 8
        other = copy.deepcopy(cache)
        order = torch.tensor([2, 0])
        other.batch_select_indices(order)
        other.batch_repeat_interleave(2)
        wanted = model(tokens).logits[:, 8:]
        close(model(tokens[:, 8:], past_key_values=cache).logits, wanted)
        got = model(tokens[order, 8:].repeat_interleave(2, 0), past_key_values=other).logits
        close(got, wanted[order].repeat_interleave(2, 0))
    cache.layers[0].crop(0)
    with pytest.raises(NotImplementedError, match=r"crop\(-2\) cannot work: Linear keeps a state \(a running sum\)"):
        cache.crop(-2)
    assert not cache.layers[0].is_croppable
    cache.layers[0].reset()
    assert (cache.layers[0].get_seq_length(), cache.layers[0].state) == (0, None)
    subquad.hf.replace(model, layers=[1], mechanism="linear")
    cache = DynamicCache(config=model.config)
    wanted = model(tokens).logits[:, 8:]
    model(tokens[:, :8], past_key_values=cache)
    close(model(tokens[:, 8:], past_key_values=copy.deepcopy(cache)).logits, wanted)  # without the graph of the states


def test_assisted_decoding_is_refused() -> None:
    model = made("llama")
    subquad.hf.replace(model, layers=[0], mechanism="linear")
    tokens = draw(1, 8, "none", seed=3)[0].repeat(1, 3)
    with pytest.raises(NotImplementedError, match=r"crop\(-\d\) cannot work"):
        model.generate(tokens, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=4)


def test_caches_that_cannot_hold_a_state_are_refused() -> None:
    model = made("llama")
    tokens, _ = draw(1, 5, "none", seed=4)
    old = DynamicCache(config=model.config)
    model(tokens, past_key_values=old)
    subquad.hf.replace(model, layers=[0], mechanism="linear")
    with pytest.raises(ValueError, match="has keys for layer 0, which was replaced since: start anew"):
        model(tokens, past_key_values=old)
    with pytest.raises(ValueError, match="has a StaticLayer for layer 0: accepted is a DynamicCache"):
        model(tokens, past_key_values=StaticCache(config=model.config, max_cache_len=9))


def test_a_pattern_in_the_other_layers() -> None:
    """A hybrid stack: one layer replaced, the other with a pattern, with padding and a cache."""
    name = subquad.hf.register(Local(4) | Global(2))
    theirs = made("llama")
    theirs.set_attn_implementation(name)
    subquad.hf.replace(theirs, layers=[0], mechanism="local", window=4)
    tokens, real = draw(3, 19, "left", seed=6)
    with torch.no_grad():
        logits = theirs(tokens, attention_mask=real, position_ids=positions(real)).logits
        for row, mask, own in zip(tokens, real.bool(), logits, strict=True):
            close(own[mask], theirs(row[mask][None]).logits[0])
        new = {"attention_mask": real, "max_new_tokens": 6, "do_sample": False}
        assert theirs.generate(tokens, **new).tolist() == theirs.generate(tokens, use_cache=False, **new).tolist()


def test_masks_are_not_ignored() -> None:
    model = made("llama")
    model.set_attn_implementation("eager")
    subquad.hf.replace(model, layers=[0], mechanism="linear")
    tokens, real = draw(2, 10, "none", seed=1)
    with pytest.raises(ValueError, match="a 4-D attention_mask that hides more than padding"):
        model(tokens, attention_mask=dense(Local(2), real))
    at = torch.cat((torch.arange(4), torch.arange(6))).expand(2, -1)
    with pytest.raises(ValueError, match="a 4-D attention_mask that hides more than padding"):
        model(tokens, position_ids=at, use_cache=False)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="position_ids that start again mark packed sequences"):
        model(tokens, position_ids=at)
    with pytest.raises(ValueError, match="cannot work with output_attentions"):
        model(tokens, output_attentions=True)
    with pytest.raises(ValueError, match="layer 0, replaced by Linear, cannot work with the argument head_mask"):
        model(tokens, head_mask=torch.ones(4))


def test_offloaded_layers_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model, tokens, folder = made("llama").eval(), torch.arange(9)[None], str(tmp_path / "disk")
    subquad.hf.replace(model, layers=[1], mechanism="mamba2")
    model.save_pretrained(tmp_path)
    parts = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
    for away, works in (("model.layers.0", True), ("model.layers.1", False)):
        places = {part: "disk" if part == away else "cpu" for part in parts}
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=folder)
        if works:
            with torch.no_grad():
                torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)
        else:
            with pytest.raises(ValueError, match="layer 1, replaced by Mamba2, reads several weights at once"):
                loaded(tokens)


def test_what_cannot_be_replaced_says_so() -> None:
    model = made("llama")
    with pytest.raises(ValueError, match="2 is not one of the layers 0 to 1"):
        subquad.hf.replace(model, layers=[2])
    with pytest.raises(ValueError, match="did you mean 'linear'"):
        subquad.hf.replace(model, mechanism="linera")
    with pytest.raises(TypeError, match="linear has no option 'window'"):
        subquad.hf.replace(model, mechanism="linear", window=3)
    with pytest.raises(ValueError, match="causal cannot be given to replace: the model has dim=32 and causal=True"):
        subquad.hf.replace(model, mechanism="linear", causal=False)
    with pytest.raises(ValueError, match="options cannot be saved"):
        subquad.hf.replace(model, mechanism="linear", feature_map=torch.relu)
    encoder = AutoModelForMaskedLM.from_config(BertConfig(**UNGROUPED, **DROPS_OF_BERT))
    with pytest.raises(ValueError, match="Linformer shares parameters between layers, which cannot be saved here"):
        subquad.hf.replace(encoder, mechanism="linformer", max_length=64, share="layer")
    assert subquad.hf.replace(encoder, layers=[], mechanism="linformer") == {}
    assert list(subquad.hf.replace(encoder, layers=[0, 0], mechanism="linformer", max_length=64)) == [0]
    assert not any(isinstance(module, Replacement) for module in model.modules())
    assert not hasattr(model.config, "subquad")
    subquad.hf.replace(model, layers=[0])
    with pytest.raises(ValueError, match="layer 0 was replaced before"):
        subquad.hf.replace(model)
    t5 = AutoModel.from_config(T5Config(vocab_size=20, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4))
    with pytest.raises(ValueError, match="T5Model has no attention modules that are known here: known are"):
        subquad.hf.replace(t5)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")  # older ones know it only
def test_a_replaced_model_trains(tmp_path: Path) -> None:
    """With their Trainer and checkpoints of activations, and the result loads."""
    model = made("llama", initializer_range=0.02)
    subquad.hf.replace(model, mechanism="gated_deltanet", expand_v=1)
    rows = [{"input_ids": (t := torch.arange(16) % 5 + 1), "labels": t} for _ in range(8)]
    how = {"per_device_train_batch_size": 4, "max_steps": 30, "learning_rate": 1e-2, "report_to": [], "use_cpu": True}
    arguments = TrainingArguments(
        output_dir=str(tmp_path), gradient_checkpointing=True, save_strategy="no", disable_tqdm=True, **how
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    before = trainer.evaluate(rows)["eval_loss"]
    trainer.train()
    after = trainer.evaluate(rows)["eval_loss"]
    assert after < 0.3 * before
    trainer.save_model(str(tmp_path / "trained"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    tokens = rows[0]["input_ids"][None, :6]
    assert loaded.generate(tokens, max_new_tokens=6, do_sample=False)[0].tolist() == (torch.arange(12) % 5 + 1).tolist()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")  # PEFT asks by this name
def test_lora_on_a_replaced_layer(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model, tokens = made("llama").eval(), torch.arange(24)[None]
    subquad.hf.replace(model, layers=[1], mechanism="linear")
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        plain = adapted(tokens).logits
        for name, parameter in adapted.named_parameters():
            if "mixer" in name and "lora_B" in name:
                parameter.normal_(std=0.3)
        logits = adapted(tokens).logits
        assert not torch.allclose(logits, plain)
        with adapted.disable_adapter():
            assert torch.equal(adapted(tokens).logits, plain)
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(merged(tokens).logits, logits, rtol=1e-4, atol=1e-4)
        merged.save_pretrained(tmp_path)
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, merged(tokens).logits)


@pytest.mark.parametrize("mechanism", ["linear", "gated_deltanet"])
def test_an_exact_window_beside_a_mechanism(tmp_path: Path, mechanism: str) -> None:
    """At first it is the window alone; then the sum of both, in the same steps, saved and loaded."""
    model, alone, both = made("llama"), made("llama"), made("llama")
    options = {"expand_v": 1} if mechanism == "gated_deltanet" else {}
    subquad.hf.replace(alone, [1], "local", window=3)
    subquad.hf.replace(both, [1], mechanism, exact_window=4, **options)
    ids = torch.randint(model.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    close(both(ids).logits, alone(ids).logits)
    assert not torch.allclose(both(ids).logits, model(ids).logits, atol=1e-3)
    layer = next(m for m in both.modules() if isinstance(m, Replacement))
    with torch.no_grad():
        for p in layer.mixer.other.parameters():
            p.normal_(std=0.5)
    x = torch.randn(2, 12, model.config.hidden_size)
    close(layer(x)[0], layer.mixer.window(x) + layer.mixer.other(x))
    whole, cache = both(ids).logits, DynamicCache(config=both.config)
    parts = [both(ids[:, :5], past_key_values=cache).logits]
    parts += [both(ids[:, t : t + 1], past_key_values=cache).logits for t in range(5, 12)]
    close(torch.cat(parts, 1), whole)
    both.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).eval()(ids).logits, whole)


def test_wrong_exact_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="exact_window"):
        subquad.hf.replace(made("llama"), exact_window=0)
    with pytest.raises(ValueError, match="exact_window cannot work with"):
        subquad.hf.replace(made("qwen3", head_dim=16), exact_window=4)
