"""Decoders of transformers with our states: every kind of layer against their own logits and their own `generate`."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra: pip install 'subquad[hf]'")

from transformers import AutoModelForCausalLM, BertConfig, LlamaForCausalLM

import subquad.hf
from subquad import Sampling, Streams, load_state, save_state
from subquad.hf import Decoder
from subquad.hf.replace import Replacement
from subquad.models.decoding import defer, limit_of, settle
from subquad.models.footprint import Rooms, bytes_per_stream
from subquad.models.state import leaves, map_state, select
from subquad.ops import Local
from tests.hf.reference import CONFIGS, UNGROUPED, draw

GREEDY = Sampling(temperature=0)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")  # Mistral and one layer of Qwen2 have a window of 9 tokens
RULES: dict[str, dict[str, Any]] = {
    "softmax everywhere": {},
    "gated delta": {"mechanism": "gated_deltanet", "expand_v": 1},
    "linear": {"mechanism": "linear", "feature_map": "hedgehog"},
    "linear beside a window": {"mechanism": "linear", "exact_window": 4},
    "window": {"mechanism": "local", "window": 3},
}


def made(family: str, rule: str, layers: int = 2) -> tuple[Any, Decoder]:
    """A model of theirs whose first layer is its own, and the same model with our states."""
    config = CONFIGS[family]()
    if rule == "linear beside a window" and family == "qwen3":
        config.head_dim = 8  # the window takes heads of width hidden_size / heads only
    config.num_hidden_layers = layers
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    if RULES[rule]:
        subquad.hf.replace(model, layers=list(range(1, layers)), **RULES[rule])
    for module in model.modules():
        if isinstance(module, Replacement) and rule == "linear beside a window":
            torch.nn.init.normal_(module.mixer.other.heads.out.weight, std=0.2)  # it begins at zero
    return model, Decoder(copy.deepcopy(model))


def near(ours: Tensor, theirs: Tensor) -> None:
    assert float((ours - theirs).abs().max()) < 1e-4 * float(theirs.abs().max())


def written(model: Any, prompt: list[int], steps: int) -> list[int]:
    """What their `generate` writes."""
    ids = torch.tensor([prompt])
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, do_sample=False)
    new: list[int] = whole[0, len(prompt) :].tolist()
    return new


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_logits_and_greedy_text_are_theirs(family: str, rule: str) -> None:
    theirs, ours = made(family, rule)
    tokens, _ = draw(3, 30, "none", seed=1)
    wanted = theirs(tokens).logits
    near(ours(tokens), wanted)
    # a prompt, steps, and another prompt from the state
    first, state = ours.prefill(tokens[:, :13])
    parts = [first]
    for t in range(13, 20):
        logits, state = ours.step(tokens[:, t], state, inplace=t % 2 == 0)
        parts.append(logits[:, None])
    last, state = ours.prefill(tokens[:, 20:], state=state)
    near(torch.cat((*parts, last), 1), wanted)
    # ragged prompts in one batch, rows at different positions
    prompts = [tokens[0, :5].tolist(), tokens[1, :17].tolist(), tokens[2, :1].tolist()]
    alone = [written(theirs, prompt, 12) for prompt in prompts]
    streams = Streams(ours, slots=4, capacity=40)
    ids = streams.admit(prompts, sampling=GREEDY)
    drawn = [streams.step() for _ in range(12)]
    assert [[made[id] for made in drawn] for id in ids] == alone
    # from a state that has read a part of the prompt
    _, before = ours.prefill(tokens[1:2, :11])
    assert ours.generate(tokens[1, 11:17], 12, state=before, sampling=GREEDY).tolist() == alone[1]


@torch.no_grad()
def test_ragged_prompts_after_states_at_different_positions() -> None:
    theirs, ours = made("llama", "gated delta")
    tokens, _ = draw(2, 30, "none", seed=2)
    _, state = ours.prefill(tokens[:, :12], torch.tensor([12, 4]))
    later = torch.stack((tokens[0, 12:20], tokens[1, 4:12]))
    logits, state = ours.prefill(later, torch.tensor([8, 3]), state)
    near(logits[:1], theirs(tokens[:1, :20]).logits[:, 12:])
    near(logits[1:, :3], theirs(tokens[1:, :7]).logits[:, 4:])
    assert state.position.tolist() == [20, 7]
    near(ours.step(tokens[[0, 1], [20, 7]], state)[0][1:], theirs(tokens[1:, :8]).logits[:, -1])


@torch.no_grad()
def test_states_are_values(tmp_path: Path) -> None:
    """Saved, loaded, taken apart; a step leaves its state alone."""
    _, ours = made("llama", "linear", layers=3)
    tokens, _ = draw(2, 20, "none", seed=3)
    _, state = ours.prefill(tokens)
    copied = [tensor.clone() for _, tensor in leaves(state)]
    wanted, _ = ours.step(tokens[:, 0], state)
    ours.prefill(tokens[:, :3], state=state)
    assert all(torch.equal(old, tensor) for old, (_, tensor) in zip(copied, leaves(state), strict=True))
    save_state(state, tmp_path / "state.safetensors")
    loaded = load_state(tmp_path / "state.safetensors", ours.init_state(1))
    assert [name for name, _ in leaves(loaded)] == [name for name, _ in leaves(state)]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(leaves(loaded), leaves(state), strict=True))
    assert torch.equal(ours.step(tokens[:, 0], loaded)[0], wanted)
    near(ours.step(tokens[1:, 0], select(loaded, slice(1, 2)))[0], wanted[1:])


def test_keys_of_a_group_are_kept_once() -> None:
    """And only the layers that kept softmax grow."""
    _, ours = made("llama", "gated delta", layers=4)
    more = bytes_per_stream(ours, 200) - bytes_per_stream(ours, 100)
    assert more == 100 * 2 * 2 * 8 * 4  # keys and values, two heads of eight numbers
    assert ours.config.transformer.kv_width == 16
    assert [one.name for one in ours.config.transformer.mechanism] == ["softmax", *["gated_deltanet"] * 3]


@torch.no_grad()
def test_steps_in_groups() -> None:
    """On a GPU a captured group of steps lets mechanisms write late."""
    for rule in RULES:
        _, ours = made("llama", rule)
        tokens, _ = draw(2, 20, "none", seed=6)
        _, state = ours.prefill(tokens)
        state = map_state(torch.clone, Rooms(ours).fit(state, 64))
        want = map_state(torch.clone, state)
        now = defer(ours, state)
        for t in range(4):
            logits, _ = ours.step(tokens[:, t], now, inplace=True)
            expected, want = ours.step(tokens[:, t], want)
        settle(ours, now, 4)
        near(logits, expected)
        near(ours.step(tokens[:, 4], state)[0], ours.step(tokens[:, 4], want)[0])


@torch.no_grad()
def test_bfloat16() -> None:
    """At most twice the error of theirs, both against float32."""
    for rule in ("softmax everywhere", "gated delta"):
        theirs, _ = made("llama", rule)
        tokens, _ = draw(2, 40, "none", seed=4)
        exact = theirs(tokens).logits
        theirs.bfloat16()
        ours = Decoder(theirs)
        logits, state = ours.prefill(tokens[:, :39])
        last, _ = ours.step(tokens[:, 39], state)
        error = float((torch.cat((logits, last[:, None]), 1).float() - exact).square().mean())
        assert error < 4 * float((theirs(tokens).logits.float() - exact).square().mean())
        assert all(t.dtype == torch.bfloat16 for name, t in leaves(state.layers[0]) if name in ("k", "v"))


def test_a_mechanism_without_state_reads_its_prefix_again() -> None:
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(CONFIGS["llama"]()).eval()
    subquad.hf.replace(theirs, [1], "synthesizer", max_length=64)
    prompt = [4, 5, 6]
    tokens = Decoder(theirs).generate(prompt, 5, sampling=GREEDY).tolist()
    for count in range(5):
        known = torch.tensor([prompt + tokens[:count]])
        assert int(theirs(known, use_cache=False).logits[0, -1].argmax()) == tokens[count]


# Folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, _ = made("llama", "gated delta")
    model.generation_config.eos_token_id = [7, 9]
    path: Path = tmp_path_factory.mktemp("models") / "student"
    model.save_pretrained(path)
    return path


@torch.no_grad()
def test_a_folder_loads(folder: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    ours = Decoder.load(folder)
    tokens, _ = draw(2, 20, "none", seed=5)
    near(ours(tokens), theirs(tokens).logits)
    assert ours.ends == (7, 9)
    assert Decoder.load(folder, dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(NotImplementedError, match="use its save_pretrained"):
        ours.save(folder)


def test_weights_that_lack_are_not_drawn(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a folder with config\.json"):
        Decoder.load(tmp_path)
    weights = folder / "model.safetensors"
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="cannot be loaded"):
        Decoder.load(tmp_path)
    tensors = load_file(weights)
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"it lacks model\.layers\.0\.self_attn\.q_proj\.weight"):
        Decoder.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(weights.read_bytes()[:-20])
    with pytest.raises(ValueError, match="cannot be loaded"):
        Decoder.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="the family 'bert': accepted are decoders of llama, mistral, qwen2, qwen3"):
        Decoder.load(tmp_path)


def test_what_would_be_read_wrongly_is_refused() -> None:
    for family in ("gemma2", "bert_decoder"):
        with pytest.raises(ValueError, match="accepted are decoders of llama"):
            Decoder(AutoModelForCausalLM.from_config(CONFIGS[family]()))
    with pytest.raises(ValueError, match="accepted are decoders of llama"):
        Decoder(AutoModelForCausalLM.from_config(BertConfig(**UNGROUPED, is_decoder=True)))
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = CONFIGS["llama"]()
    config.rope_parameters = rope
    with pytest.raises(ValueError, match="of type 'dynamic' depends on the layer or the length: accepted here are"):
        Decoder(LlamaForCausalLM(config))
    config = CONFIGS["mistral"]()
    config.head_dim = 16
    with pytest.raises(ValueError, match="sliding_window=9 cannot work: accepted is None"):
        Decoder(AutoModelForCausalLM.from_config(config))
    name = subquad.hf.register(Local(4))
    with pytest.raises(ValueError, match="attn_implementation='subquad_local"):
        Decoder(AutoModelForCausalLM.from_config(CONFIGS["llama"](), attn_implementation=name))
    _, ours = made("gpt2", "linear")
    assert limit_of(ours) == 512
    with pytest.raises(ValueError, match="this model has 2"):
        ours.step(torch.tensor([1]), made("gpt2", "linear", layers=3)[1].init_state(1))
