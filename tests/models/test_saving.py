import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from subquad.models import Classifier, LanguageModel, Matcher, Model, Seq2Seq, Transformer, TransformerConfig, load
from subquad.models.saving import check_finite

SMALL: dict[str, Any] = {"dim": 16, "heads": 4, "depth": 2}
TOKENS = torch.arange(12).view(2, 6) % 11
MODELS: list[tuple[Model, tuple[Any, ...]]] = [
    (Transformer(**SMALL, mechanism="linear, performer"), (torch.randn(2, 6, 16),)),
    (LanguageModel(vocab=11, **SMALL, tie=True, mechanism="softmax", positions="grid", shape=(3, 2)), (TOKENS,)),
    (Classifier(classes=3, vocab=11, **SMALL, pooling="cls", mechanism="bigbird"), (TOKENS,)),
    (Matcher(vocab=11, **SMALL, reversible=True), (TOKENS, TOKENS)),
    (Seq2Seq(vocab=11, **SMALL, share=True, tie=True), (TOKENS, TOKENS)),
]


@pytest.mark.parametrize(("model", "inputs"), MODELS, ids=lambda v: type(v).__name__)
def test_what_comes_back_is_the_same(model: Model, inputs: tuple[Any, ...], tmp_path: Path) -> None:
    model.save(tmp_path / "deep" / "model")
    again = load(tmp_path / "deep" / "model")
    assert type(again) is type(model)
    assert again.config == model.config
    assert not again.training
    with torch.no_grad():
        assert torch.equal(again(*inputs), model.eval()(*inputs))
    assert sorted(os.listdir(tmp_path / "deep" / "model")) == ["config.json", "model.safetensors"]
    assert type(model).load(tmp_path / "deep" / "model").config == model.config


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = Seq2Seq(vocab=11, **SMALL, share=True)
    model.save(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert ("source.weight" in names) + ("target.weight" in names) == 1
    again = Seq2Seq.load(tmp_path)
    assert again.source.weight is again.target.weight
    assert torch.equal(again.source.weight, model.source.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_type_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    model = LanguageModel(vocab=11, **SMALL, mechanism="linear, performer").to(dtype).eval()
    model.save(tmp_path)
    again = LanguageModel.load(tmp_path)
    assert {n: t.dtype for n, t in again.state_dict().items()} == {n: t.dtype for n, t in model.state_dict().items()}
    with torch.no_grad():
        assert torch.equal(again(TOKENS), model(TOKENS))
        state = again.init_state(2)
        assert torch.equal(again.step(TOKENS[:, 0], state)[0], model.step(TOKENS[:, 0], state)[0])


def test_saving_again_replaces(tmp_path: Path) -> None:
    first, second = (LanguageModel(vocab=11, **SMALL) for _ in range(2))
    first.save(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    second.save(tmp_path)
    assert torch.equal(LanguageModel.load(tmp_path).embedding.weight, second.embedding.weight)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors", "notes.txt"]


def test_a_failed_save_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LanguageModel(vocab=11, **SMALL)
    model.save(tmp_path)
    other = LanguageModel(vocab=11, dim=16, heads=4, depth=1)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    for moment in ("fsync", "replace"):  # while writing, and before the finished file replaces the old one
        monkeypatch.setattr(os, moment, full)
        with pytest.raises(OSError, match="no space left"):
            other.save(tmp_path)
        monkeypatch.undo()
        assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
        assert torch.equal(LanguageModel.load(tmp_path).embedding.weight, model.embedding.weight)
    # killed between the two files: the weights are new, the config is old
    stale = (tmp_path / "config.json").read_text()
    other.save(tmp_path)
    (tmp_path / "config.json").write_text(stale)
    with pytest.raises(ValueError, match=r"is not the config that .* was saved with"):
        LanguageModel.load(tmp_path)
    (tmp_path / "config.json").unlink()
    assert torch.equal(LanguageModel.load(tmp_path).embedding.weight, other.embedding.weight)


def test_functions_cannot_be_saved(tmp_path: Path) -> None:
    model = Transformer(**SMALL, mechanism=("linear", {"feature_map": torch.exp}))
    with pytest.raises(ValueError, match=r"feature_map=.*cannot be saved"):
        model.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    LanguageModel(vocab=11, **SMALL).save(tmp_path)
    return tmp_path


def damage(directory: Path, **changes: torch.Tensor | None) -> None:
    """Rewrite the weights with some tensors changed, and without their copy of the config."""
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, directory / "model.safetensors")


def test_every_tensor_must_fit(saved: Path) -> None:
    damage(saved)
    LanguageModel.load(saved)  # weights of another program with our config.json
    damage(saved, head__bias=None)
    with pytest.raises(ValueError, match=r"does not fit its config: it lacks head\.bias"):
        load(saved)
    damage(saved, head__bias=torch.zeros(11), extra=torch.zeros(1))
    with pytest.raises(ValueError, match="it has unknown extra"):
        load(saved)
    damage(saved, head__bias=torch.zeros(12), extra=None)
    with pytest.raises(ValueError, match=r"head\.bias has shape \[12\]: accepted is \[11\]"):
        load(saved)


def edit(directory: Path, **changes: Any) -> None:
    damage(directory)
    header = json.loads((directory / "config.json").read_text())
    header.update(changes)
    (directory / "config.json").write_text(json.dumps(header))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 9}, "has format 9: this version reads 1"),
        ({"model": "Diffuser"}, "holds a 'Diffuser': accepted are Transformer, LanguageModel"),
        ({"dtype": "float31"}, "dtype='float31'"),
        ({"config": {"vocab": 3}}, "LanguageModelConfig has no key 'vocab'"),
        ({"extra": 1, "model_type": "llama"}, "is not a model's config"),
    ],
)
def test_bad_configs(saved: Path, changes: dict[str, Any], message: str) -> None:
    edit(saved, **changes)
    with pytest.raises(ValueError, match=message):
        load(saved)


def test_bad_files(saved: Path) -> None:
    with pytest.raises(ValueError, match=r"holds a LanguageModel: load it with LanguageModel\.load"):
        Classifier.load(saved)
    (saved / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        load(saved)
    weights = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or not a safetensors file"):
        load(saved)
    with pytest.raises(FileNotFoundError, match="a saved model is a directory with"):
        load(saved / "nowhere")


def test_weights_without_any_config(saved: Path) -> None:
    damage(saved)
    (saved / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="holds no config"):
        load(saved)


def test_a_flipped_bit_is_refused_or_changes_nothing(saved: Path) -> None:
    chance = random.Random(0)
    intact = {name: tensor.clone() for name, tensor in LanguageModel.load(saved).state_dict().items()}
    files = {file: file.read_bytes() for file in saved.iterdir()}
    refused = 0
    for _ in range(60):
        file = chance.choice(sorted(files))
        data = bytearray(files[file])
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
        try:
            found = load(saved).state_dict()
        except ValueError:
            refused += 1
        else:
            assert all(torch.equal(tensor, found[name]) for name, tensor in intact.items())
        file.write_bytes(files[file])
    assert refused > 50


def test_the_digest_covers_weights_and_config(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    damage(saved, head__bias=tensors["head.bias"] + 1)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: weights and config are not what was saved"):
        load(saved)
    damage(saved, head__bias=tensors["head.bias"])
    load(saved)
    header = json.loads((saved / "config.json").read_text())
    header["config"]["transformer"]["norm_eps"] = 1e-4
    (saved / "config.json").write_text(json.dumps(header))
    with pytest.raises(ValueError, match="weights and config are not what was saved"):
        load(saved)


def test_a_model_without_a_digest_loads_and_says_so(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(saved)
    assert not caplog.records
    header = json.loads((saved / "config.json").read_text())
    del header["sha256"]
    (saved / "config.json").write_text(json.dumps(header))
    load(saved)
    assert [record.getMessage() for record in caplog.records] == [
        f"{saved} has no digest, so its weights cannot be checked for changes"
    ]


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("embedding", {"vocab": 10**10}, r"embedding\.weight has shape \[11, 16\]: accepted is \[10000000000, 16\]"),
        ("embedding", {"vocab": 10**18}, "which no model can be built from"),
        ("transformer", {"dim": 4 * 10**9}, "has shape|no model can be built"),
        ("transformer", {"depth": 300_000}, "depth=300,000, but it holds only 29 tensors"),
        ("transformer", {"depth": 10**15}, "depth=1,000,000,000,000,000, but it holds only 29 tensors"),
        ("transformer", {"depth": 20}, r"it lacks transformer\.blocks\.10\..* and \d+ more"),
        ("transformer", {"mechanism": [{"name": "performer", "options": {"features": 10**11}}]}, "does not fit"),
        ("transformer", {"norm_eps": "small"}, "no model can be built"),
    ],
)
def test_a_config_asks_for_no_more_than_the_file_holds(
    saved: Path, part: str, change: dict[str, Any], message: str
) -> None:
    """Checked before anything is allocated, because these would need up to 640 GB or hours."""
    header = json.loads((saved / "config.json").read_text())
    del header["sha256"]
    header["config"][part].update(change)
    tensors = load_file(saved / "model.safetensors")
    save_file(tensors, saved / "model.safetensors", metadata={"subquad": json.dumps(header)})
    (saved / "config.json").write_text(json.dumps(header))
    with pytest.raises(ValueError, match=message):
        load(saved)


def test_a_config_of_unbounded_depth_is_checked_at_once() -> None:
    with pytest.raises(ValueError, match="depth=1000000000000000 cannot work"):
        TransformerConfig(dim=8, depth=10**15, pool=(1, 1))


@pytest.mark.parametrize("damage", [b"\xff", b"[" * 100_000])
def test_a_config_that_is_no_json_is_named(saved: Path, damage: bytes) -> None:
    (saved / "config.json").write_bytes(damage)
    with pytest.raises(ValueError, match=r"config\.json (holds 0xff|is nested too deep)"):
        load(saved)


def test_weights_that_are_no_numbers_are_named(saved: Path) -> None:
    model = load(saved)
    check_finite(model, saved)
    with torch.no_grad():
        model.get_parameter("head.bias")[2] = torch.inf
    with pytest.raises(ValueError, match=r"head\.bias holds 1 of 11 values that are NaN or infinite"):
        check_finite(model, saved)
