"""Folders that both sides read: saved here and loaded there, damaged, converted, with tokenizers and cards."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="needs the extra: pip install 'subquad[hf]'")

from huggingface_hub import ModelCard
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from transformers.utils import PushToHubMixin

import subquad
from subquad.cli import app
from subquad.hf import SubquadConfig, SubquadForCausalLM, byte_tokenizer, convert, unwrap, wrap
from subquad.models import Classifier, LanguageModel, Matcher
from subquad.models.saving import restore
from tests.hf.tiny import KINDS, VOCAB, make, padded, saved

CLASSIFIERS: list[dict[str, Any]] = [
    {"mechanism": "nystrom", "pooling": "mean"},
    {"mechanism": ("linformer", {"rank": 4, "share": "layer"}), "pooling": "cls", "positions": "learned"},
    {"mechanism": "linear", "pool": (1, 2), "head_hidden": 8},
]


def classifier(**fields: Any) -> Classifier:
    torch.manual_seed(0)
    sizes = {"classes": 3, "vocab": VOCAB, "dim": 16, "depth": 2, "heads": 2, "max_length": 32}
    return Classifier(**{**sizes, **fields}).eval()


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return list(first) == list(second) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(first.values(), second.values(), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, ids = make(kind).to(dtype), torch.randint(VOCAB, (2, 9))
    model.save(tmp_path / "ours")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert isinstance(theirs, SubquadForCausalLM)
    assert (theirs.dtype, theirs.training) == (dtype, False)
    assert same(unwrap(theirs), model)
    theirs.save_pretrained(tmp_path / "theirs")
    again = subquad.load(tmp_path / "theirs")
    assert same(again, model)
    assert again.config == model.config
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids, use_cache=False).logits, model(ids))
        torch.testing.assert_close(again(ids), model(ids))
    assert "sha256" in json.loads((tmp_path / "theirs" / "config.json").read_text())
    base = AutoModel.from_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        torch.testing.assert_close(model._logits(base(ids).last_hidden_state), model(ids))


@pytest.mark.parametrize("fields", CLASSIFIERS, ids=lambda fields: fields.get("pooling", "pooled layers"))
def test_classifiers(fields: dict[str, Any], tmp_path: Path) -> None:
    model = classifier(**fields)
    model.save(tmp_path / "ours")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    assert theirs.config.num_labels == 3
    rows = [torch.randint(VOCAB, (size,)) for size in (5, 9, 2)]
    for side in ("left", "right"):
        ids, mask = padded(rows, side)
        with torch.no_grad():
            logits = theirs(ids, attention_mask=mask).logits
            for row, found in zip(rows, logits, strict=True):
                torch.testing.assert_close(found, model(row[None])[0], rtol=1e-4, atol=1e-5)
    labels = torch.tensor([0, 2, 1])
    loss = theirs(ids, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, labels))
    theirs.save_pretrained(tmp_path / "theirs")
    assert same(subquad.load(tmp_path / "theirs"), model)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        assert torch.equal(again(ids, attention_mask=mask).logits, logits)
    if fields.get("pool") is None:
        base = AutoModel.from_pretrained(tmp_path / "ours")
        with torch.no_grad():
            assert base(ids, attention_mask=mask).last_hidden_state.shape == (3, 9, 16)
    else:
        with pytest.raises(ValueError, match="this model pools its sequence"):
            AutoModel.from_pretrained(tmp_path / "ours")(ids)
    with pytest.raises(RuntimeError, match=r"mismatch"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours", num_labels=5)
    if fields.get("head_hidden") is None:
        more = AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "ours", num_labels=5, ignore_mismatched_sizes=True
        )
        assert more(ids, attention_mask=mask).logits.shape == (3, 5)
        assert 0.01 < more.core.head.weight.std() < 0.03
        more.save_pretrained(tmp_path / "more")
        assert subquad.load(tmp_path / "more").config.classes == 5


def test_a_language_model_becomes_a_classifier(tmp_path: Path) -> None:
    model = make("constant")
    model.save(tmp_path / "lm")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=4)
    ids, mask = padded([torch.tensor([1, 2, 3]), torch.tensor([4])], "left")
    assert theirs(ids, attention_mask=mask, labels=torch.tensor([3, 0])).logits.shape == (2, 4)
    ours = unwrap(theirs)
    assert torch.equal(ours.tower.embedding.weight, model.embedding.weight)
    theirs.save_pretrained(tmp_path / "classifier")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    assert torch.equal(again(ids, attention_mask=mask).logits, theirs(ids, attention_mask=mask).logits)
    tagger = AutoModelForTokenClassification.from_pretrained(tmp_path / "lm", num_labels=3)
    assert tagger(ids, attention_mask=mask).logits.shape == (2, 3, 3)


def test_labels_of_tokens(tmp_path: Path) -> None:
    model = classifier(mechanism="softmax", pooling="none")
    model.save(tmp_path)
    theirs = AutoModelForTokenClassification.from_pretrained(tmp_path)
    rows = [torch.randint(VOCAB, (size,)) for size in (4, 7)]
    ids, mask = padded(rows, "left")
    labels = torch.randint(3, ids.shape)
    output = theirs(ids, attention_mask=mask, labels=labels)
    losses = []
    for row, logits, own, label in zip(rows, output.logits, mask.bool(), labels, strict=True):
        torch.testing.assert_close(logits[own], model(row[None])[0], rtol=1e-4, atol=1e-5)
        losses.append(torch.nn.functional.cross_entropy(logits[own], label[own], reduction="sum"))
    torch.testing.assert_close(output.loss, torch.stack(losses).sum() / 11)
    classifier(mechanism="softmax").save(tmp_path)
    with pytest.raises(ValueError, match="pooling='mean' cannot work"):
        AutoModelForTokenClassification.from_pretrained(tmp_path)


def test_the_loss_is_that_of_our_model(tmp_path: Path) -> None:
    """Of each token given those before it: the same on either side of the padding, whatever the padding holds."""
    model = make("hybrid")
    theirs = wrap(model)
    rows = [torch.randint(VOCAB, (size,)) for size in (5, 9, 1)]
    right, mask = padded(rows, "right")
    wanted = model.loss(right, lengths=mask.sum(1))
    for side in ("left", "right"):
        ids, mask = padded(rows, side, filler=3)
        output = theirs(ids, attention_mask=mask, labels=ids)
        torch.testing.assert_close(output.loss, wanted)
        torch.testing.assert_close(theirs(ids, attention_mask=mask, labels=ids, num_items_in_batch=24).loss, wanted / 2)
        hidden = ids.masked_fill(mask == 0, -100)
        torch.testing.assert_close(theirs(ids, attention_mask=mask, labels=hidden).loss, wanted)


def test_log_likelihoods_of_continuations() -> None:
    """As evaluation programs compute them: log-softmax of the logits at the places before a continuation."""
    model = make("window")
    theirs, ids = wrap(model), torch.randint(VOCAB, (1, 12))
    with torch.no_grad():
        scores = theirs(ids).logits.log_softmax(-1)[0, 7:-1].gather(-1, ids[0, 8:, None]).sum()
    targets = ids.clone()
    targets[:, :8] = -100
    lost = model.loss(ids[:, :-1], targets=targets[:, 1:], reduction="sum")
    torch.testing.assert_close(scores, -lost)


def test_wrapping_shares_the_modules() -> None:
    model = make("growing")
    theirs = wrap(model.train())
    assert theirs.training
    assert theirs.get_parameter("embedding.weight") is model.embedding.weight
    assert list(theirs.state_dict()) == list(model.state_dict())
    assert unwrap(theirs) is model
    fresh = AutoModelForCausalLM.from_config(SubquadConfig.of(model.config))
    assert list(fresh.state_dict()) == list(model.state_dict())
    torch.manual_seed(3)
    ours = LanguageModel(model.config)
    torch.manual_seed(3)
    assert same(unwrap(AutoModelForCausalLM.from_config(SubquadConfig.of(model.config))), ours)
    with pytest.raises(ValueError, match="accepted is a LanguageModel or a Classifier"):
        wrap(Matcher(vocab=4, dim=8, heads=2, depth=1))
    with pytest.raises(ValueError, match="accepted is a model that `wrap` or from_pretrained made"):
        unwrap(model)


@pytest.mark.parametrize("kind", ["constant", "growing"])  # the second ties its head to the embedding
def test_the_vocabulary_grows_and_shrinks(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    before = model.embedding.weight.detach().clone()
    theirs, ids = wrap(model), torch.randint(VOCAB, (1, 6))
    plain = theirs(ids).logits.detach()
    assert theirs.config.tie_word_embeddings == (kind == "growing")
    theirs.resize_token_embeddings(VOCAB + 5, mean_resizing=False)
    assert torch.equal(model.embedding.weight[:VOCAB], before)
    assert 0.1 < model.embedding.weight[VOCAB:].std() < 0.5  # 1/√16 = 0.25
    assert theirs.config.vocab_size == model.config.embedding.vocab == VOCAB + 5
    logits = theirs(torch.full((1, 1), VOCAB + 4)).logits
    assert logits.shape == (1, 1, VOCAB + 5)
    torch.testing.assert_close(theirs(ids).logits[..., :VOCAB], plain)
    theirs.save_pretrained(tmp_path)
    assert same(subquad.load(tmp_path), model)
    assert (model.head is None) == (kind == "growing")
    theirs.resize_token_embeddings(VOCAB - 3)
    assert theirs.generate(torch.tensor([[1]]), max_new_tokens=3, do_sample=False).shape == (1, 4)
    theirs.resize_token_embeddings(pad_to_multiple_of=8)
    assert theirs.config.vocab_size == 24
    mixture = wrap(LanguageModel(vocab=256, dim=8, depth=1, heads=2, mixture=2))
    with pytest.raises(ValueError, match="outputs are not one logit for each token"):
        mixture.resize_token_embeddings(300)


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change the weights as another program would, and remove the digest."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder, sha256=None)


def edit(folder: Path, **changes: Any) -> None:
    header = json.loads((folder / "config.json").read_text())
    header.update(changes)
    header = {key: value for key, value in header.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(header))


def test_damaged_and_wrong_folders(tmp_path: Path) -> None:
    make("constant").save(tmp_path)
    load, whole = AutoModelForCausalLM.from_pretrained, (tmp_path / "model.safetensors").read_bytes()
    header = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(whole[:-40])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or not a safetensors file"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: weights and config are not what was saved"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole)
    rewrite(tmp_path, **{"head.bias": None})
    with pytest.raises(ValueError, match=r"does not fit its config: it lacks head\.bias"):
        load(tmp_path)
    rewrite(tmp_path, **{"head.bias": torch.zeros(VOCAB), "extra": torch.zeros(1)})
    with pytest.raises(ValueError, match="it has unknown extra"):
        load(tmp_path)
    rewrite(tmp_path, extra=None, **{"transformer.norm.weight": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="mismatch"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"it lacks transformer\.norm\.weight"):
        load(tmp_path, ignore_mismatched_sizes=True)
    (tmp_path / "model.safetensors").write_bytes(whole)
    for change, message in (
        ({"format": 9}, "format=9 cannot work"),
        ({"model": "Seq2Seq"}, "model='Seq2Seq' cannot work: .* load a Seq2Seq with subquad.load"),
        ({"model": "Diffuser"}, "model='Diffuser' cannot work"),
        ({"config": {"vocab": 3}}, "LanguageModelConfig has no key 'vocab'"),
        ({"config": None}, "config"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**header, **change}))
        with pytest.raises(ValueError, match=message):
            load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(header))
    classifier().save(tmp_path / "classifier")
    with pytest.raises(ValueError, match=r"SubquadForCausalLM wraps a LanguageModel; use AutoModelForSequence"):
        load(tmp_path / "classifier")


def test_models_of_frames_and_of_other_outputs_are_refused_by_name(tmp_path: Path) -> None:
    frames = Classifier(classes=2, features=5, dim=8, depth=1, heads=2)
    frames.save(tmp_path)
    with pytest.raises(ValueError, match=r"features=5 cannot work: .* use subquad\.load"):
        wrap(frames)
    with pytest.raises(ValueError, match=r"outputs=3 cannot work: accepted is None: one logit for each token"):
        wrap(LanguageModel(vocab=5, dim=8, depth=1, heads=2, outputs=3))
    with pytest.raises(ValueError, match=r"features=5 cannot work: .* use subquad\.load"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_what_goes_to_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`push_to_hub`, up to the network: a folder that both sides read, with its digest and a card."""
    sent, model = tmp_path / "sent", make("constant")

    def send(_: Any, folder: str, *__: Any, **___: Any) -> None:
        shutil.copytree(folder, sent)

    monkeypatch.setattr(PushToHubMixin, "_upload_modified_files", send)
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *_, **__: SimpleNamespace(repo_id="me/model"))
    monkeypatch.setattr(ModelCard, "load", lambda *_, **__: ModelCard("---\ntags: []\n---\n"))
    wrap(model).push_to_hub("me/model")
    assert {path.name for path in sent.iterdir()} == {
        "README.md", "config.json", "generation_config.json", "model.safetensors"
    }  # fmt: skip
    config = json.loads((sent / "config.json").read_text())
    assert "sha256" in config
    assert "auto_map" not in config  # no remote code
    assert "subquad" in ModelCard(sent.joinpath("README.md").read_text()).data.to_dict()["tags"]
    ids = torch.randint(VOCAB, (1, 9))
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(sent)(ids).logits, model(ids))
        assert torch.equal(subquad.load(sent).eval()(ids), model(ids))


def test_the_places_of_layers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model, ids, how = make("hybrid"), torch.randint(VOCAB, (2, 9)), {"offload_folder": str(tmp_path / "disk")}
    folder = saved(model, tmp_path / "model")
    wanted = model.generate(ids, 3, temperature=0)
    parts = ("embedding", *(f"transformer.blocks.{n}" for n in range(3)), "transformer.norm", "head")
    places: Any
    for places in ("auto", "cpu", dict.fromkeys(parts, "cpu")):
        theirs = AutoModelForCausalLM.from_pretrained(folder, device_map=places)
        assert torch.equal(theirs.generate(ids, max_new_tokens=3, do_sample=False)[:, 9:], wanted)
    for places in ({"": "disk"}, {**dict.fromkeys(parts, "cpu"), "transformer.blocks.1": "disk"}):
        with pytest.raises(ValueError, match=r"device_map=.* cannot work: accepted is GPUs, or the CPU alone"):
            AutoModelForCausalLM.from_pretrained(folder, device_map=places, **how)
    theirs.hf_device_map = {"embedding": 0, "transformer": 1, "head": 1}
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids))  # without a cache, unless it is asked for
    with pytest.raises(ValueError, match="accepted is one device to generate with a cache; or use_cache=False"):
        theirs.generate(ids, max_new_tokens=3)


def test_older_folders_still_load_and_convert_makes_them_new(tmp_path: Path) -> None:
    """Folders from before transformers' keys: config.json has ours only."""
    model = make("constant")
    model.save(tmp_path / "old")
    edit(tmp_path / "old", model_type=None, architectures=None)
    assert same(subquad.load(tmp_path / "old"), model)
    with pytest.raises(ValueError, match="model_type"):
        AutoConfig.from_pretrained(tmp_path / "old")
    convert(tmp_path / "old", tmp_path / "new")
    assert same(unwrap(AutoModelForCausalLM.from_pretrained(tmp_path / "new")), model)


def test_keys_of_transformers_do_not_disturb_us(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make("constant")
    model.save(tmp_path)
    edit(tmp_path, transformers_version="5.99", something_new=[1], id2label={"0": "a"})
    assert same(subquad.load(tmp_path), model)
    assert not caplog.records  # the digest still fits
    edit(tmp_path, model_type="llama")
    with pytest.raises(ValueError, match="is not a model's config"):
        subquad.load(tmp_path)


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["convert", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_convert_both_ways_without_loss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LanguageModel(vocab=256, dim=16, depth=2, heads=2, mechanism="performer, mamba2").to(torch.bfloat16)
    model.save(tmp_path / "ours")
    run(str(tmp_path / "ours"), "--out", str(tmp_path / "hub"), "--tokenizer", "bytes")
    assert {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(
        os.listdir(tmp_path / "hub")
    )
    run(str(tmp_path / "hub"), "--out", str(tmp_path / "back"), "--to", "subquad")
    assert (tmp_path / "back" / "config.json").read_bytes() == (tmp_path / "ours" / "config.json").read_bytes()
    assert same(subquad.load(tmp_path / "back"), model)
    run(str(tmp_path / "hub"), "--out", str(tmp_path / "hub2"))  # keeps the tokenizer
    assert (tmp_path / "hub2" / "tokenizer.json").read_bytes() == (tmp_path / "hub" / "tokenizer.json").read_bytes()
    card = ModelCard.load(tmp_path / "hub" / "README.md")  # as a hub reads it
    assert (card.data.pipeline_tag, card.data.library_name) == ("text-generation", "transformers")
    assert {"subquad", "performer", "mamba2"} <= set(card.data.tags)
    assert "import subquad.hf" in card.text
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    theirs.save_pretrained(tmp_path / "parts", max_shard_size="10KB")
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    assert same(unwrap(AutoModelForCausalLM.from_pretrained(tmp_path / "parts")), model)
    convert(tmp_path / "parts", tmp_path / "whole", to="subquad")
    assert same(subquad.load(tmp_path / "whole"), model)


def test_what_convert_refuses(tmp_path: Path) -> None:
    make("constant").save(tmp_path / "small")
    Matcher(vocab=4, dim=8, heads=2, depth=1).save(tmp_path / "matcher")
    for words, message in (
        (("nowhere",), "neither a run, nor the folder"),
        ((str(tmp_path / "matcher"),), "transformers has no place for this model"),
        ((str(tmp_path / "small"), "--to", "gguf"), "to='gguf' cannot work"),
        ((str(tmp_path / "small"), "--tokenizer", "bytes"), "this model has 23 tokens, fewer than there are bytes"),
        ((str(tmp_path / "small"), "--tokenizer", "words"), '"bytes", "none" or the folder of a tokenizer'),
        ((str(tmp_path / "small"), "--to", "subquad", "--tokenizer", "bytes"), "its folders have none"),
    ):
        done = CliRunner().invoke(app, ["convert", *words, "--out", str(tmp_path / "out")])
        assert done.exit_code == 2, done.output
        assert message in " ".join(done.output.split()), done.output
    byte_tokenizer().save_pretrained(tmp_path / "bytes")
    with pytest.raises(ValueError, match="at most 23 tokens, as many as the model: this has 256"):
        convert(tmp_path / "small", tmp_path / "out", tokenizer=tmp_path / "bytes")


TEXT = "Plain, öäü €, \U0001f600 \x00\x01\x7f\t\n  two  spaces  Ā Ġ ĩ <s> é e\u0301"


def test_the_byte_tokenizer_is_exact_and_needs_nothing_of_ours(tmp_path: Path) -> None:
    made = byte_tokenizer()
    ids = made(TEXT)["input_ids"]
    assert ids == list(TEXT.encode())
    assert made.decode(ids) == TEXT
    assert made(TEXT).keys() == {"input_ids", "attention_mask"}
    made.save_pretrained(tmp_path)
    code = (
        "import sys; from transformers import AutoTokenizer; tokenizer = AutoTokenizer.from_pretrained(sys.argv[1]);"
        "text = sys.stdin.buffer.read().decode(); ids = tokenizer(text)['input_ids'];"
        "assert 'subquad' not in sys.modules and tokenizer.padding_side == 'left';"
        "assert ids == list(text.encode()) and tokenizer.decode(ids) == text;"
        "print(tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], input=TEXT.encode(), capture_output=True)
    assert done.stdout.split() == [b"0", b"0", b"256"], done.stderr.decode()
    batch = made(["abc", "a"], return_tensors="pt", padding=True)
    assert batch["input_ids"].tolist() == [[97, 98, 99], [0, 0, 97]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert made.batch_decode(batch["input_ids"], skip_special_tokens=True) == ["abc", "a"]
    assert made.decode([0xC3]) == "\ufffd"  # half a character


def test_special_tokens_behind_the_bytes(tmp_path: Path) -> None:
    made = byte_tokenizer("<s>", "<mask>")
    assert made("a<mask>b<s>")["input_ids"] == [97, 257, 98, 256]
    made.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("<s>")["input_ids"] == [256]
    for wrong in (("<s>", "<s>"), ("x",), ("",)):
        with pytest.raises(ValueError, match="accepted is different names of special tokens"):
            byte_tokenizer(*wrong)


def test_a_run_on_text_gets_the_byte_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    LanguageModel(vocab=256, dim=8, depth=1, heads=2).save(tmp_path / "run" / "model")
    assert not (convert(tmp_path / "run", tmp_path / "plain") / "tokenizer.json").exists()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"task": "text"}))
    out = convert(tmp_path / "run", tmp_path / "text")
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert theirs.generation_config.pad_token_id == theirs.generation_config.eos_token_id == 0
    assert len(tokenizer) == 256


def test_a_shipped_checkpoint_loads(tmp_path: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(convert("mnist_linear", tmp_path))
    ours = subquad.load("mnist_linear")
    first = torch.full((2, 1), ours.config.embedding.vocab - 1)
    found = theirs.generate(first, max_new_tokens=12, do_sample=False)
    assert torch.equal(found[:, 1:], ours.generate(first, 12, temperature=0))


def test_what_is_not_saved_is_recomputed(tmp_path: Path) -> None:
    """A redrawn pattern comes back, by our loader too."""
    torch.manual_seed(0)
    mechanism = ("bigbird", {"block": 2, "random": 1})
    model = LanguageModel(vocab=VOCAB, dim=16, depth=1, heads=2, mechanism=mechanism).eval()
    plain = model(ids := torch.randint(VOCAB, (1, 32)))
    model.transformer.blocks[0].mixer.redraw(torch.Generator().manual_seed(5))
    assert not torch.allclose(model(ids), plain)
    model.save(tmp_path)
    torch.testing.assert_close(subquad.load(tmp_path)(ids), model(ids))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(theirs(ids).logits, model(ids))
    restore(model)
    torch.testing.assert_close(theirs(ids).logits, model(ids))


def test_the_config_answers_what_programs_ask(tmp_path: Path) -> None:
    model = make("constant")
    model.save(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (
        VOCAB, 16, 2, 2,
    )  # fmt: skip
    assert config.parsed() == model.config
    assert SubquadConfig.from_dict(config.to_dict()).parsed() == model.config
    assert not hasattr(SubquadConfig(), "sha256")
    with pytest.raises(ValueError, match="accepted is the config of a LanguageModel or a Classifier"):
        SubquadConfig.of(model.config.embedding)


def test_without_the_extra_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.startswith("subquad.hf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = CliRunner().invoke(app, ["convert", "mnist_linear", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "pip install 'subquad[hf]'" in done.output
