"""A teacher of two layers, trained here, and students made of it."""

import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner

import subquad.hf
from subquad.cli import app
from subquad.hf import LineariseSettings, Measures, byte_tokenizer, linearise
from subquad.hf.linearise import learn, page, run, text
from subquad.hf.linearise.measure import measure, state_bytes
from subquad.hf.linearise.models import load_teacher, make_student, replaced
from subquad.training.precision import Precision
from subquad.training.signals import Interrupted

WORDS = (
    "the",
    "a",
    "old",
    "grey",
    "sea",
    "ship",
    "house",
    "lane",
    "garden",
    "winter",
    "river",
    "stone",
    "came",
    "held",
)
SMALL = {
    "keep": 0.0, "align_steps": 8, "align_batch": 4, "align_length": 64, "align_lr": 1e-2, "distil_steps": 6,
    "distil_batch": 2, "distil_length": 64, "warmup": 2, "evaluate_rows": 4, "checkpoint_every": 3,
}  # fmt: skip
QUICK = Measures(lengths=(32, 96), steps=1, prompts=("the old sea",), new_tokens=4)
PLAIN = Precision("fp32", torch.device("cpu"))


def sentences(count: int) -> str:
    draw = random.Random(0)
    parts = [" ".join(draw.choice(WORDS) for _ in range(6)) for _ in range(count)]
    return "\n".join(f"{part} {part}." for part in parts)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(sentences(1000))
    return path


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, book: Path) -> Path:
    """Its layers read each other's tokens: it has learned that sentences repeat their words."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=0, pad_token_id=0,
        bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    tokens = torch.tensor(list(book.read_bytes()))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(200):
        x = text.batch(tokens, 8, 64, 0, step)
        model(x, labels=x, use_cache=False).loss.backward()
        optimiser.param_groups[0]["lr"] = 1e-2 * (1 - step / 200)
        optimiser.step()
        optimiser.zero_grad()
    folder = tmp_path_factory.mktemp("teacher")
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def student(teacher: Path, book: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("made") / "student"
    report = linearise(teacher, out, book, measures=QUICK, **SMALL | {"align_steps": 100, "distil_steps": 20})
    assert report is not None
    return out, report


def rows_of(book: Path) -> torch.Tensor:
    return text.rows(torch.tensor(list(book.read_bytes())), 64, 4)


# What a student is


def test_alignment_makes_each_layers_error_ten_times_smaller(student: tuple[Path, dict[str, Any]]) -> None:
    _, report = student
    for row in report["layers"]:
        assert row["aligned_error"] < 0.1 * row["first_error"]
    assert report["perplexity"]["student"] < 1.3 * report["perplexity"]["teacher"] < 4


def test_the_report(student: tuple[Path, dict[str, Any]]) -> None:
    out, report = student
    assert json.loads((out / "linearise.json").read_text()) == report
    values = report["perplexity"]
    assert {"teacher", "student", "linear part off", "window only, untrained"} <= values.keys()
    assert report["converted"] is (values["linear part off"] >= 1.1 * values["student"]) is True
    assert [row["layer"] for row in report["layers"] if row["softmax"]] == []
    assert all("nats a token, rank" in row["why"] for row in report["layers"])
    assert sorted(row["rank"] for row in report["layers"]) == [1, 2]
    first, last = report["decoding"]
    assert first["student"]["linear_state_bytes"] == last["student"]["linear_state_bytes"] > 0
    assert first["student"]["softmax_state_bytes"] == first["teacher"]["linear_state_bytes"] == 0
    assert last["teacher"]["softmax_state_bytes"] > first["teacher"]["softmax_state_bytes"] > 0
    assert [row.keys() for row in report["answers"]] == [{"prompt", "teacher", "student"}]
    assert {"align", "distil"} == report["curves"].keys()
    assert {"commit", "machine", "date"} <= report.keys()
    written = (out / "README.md").read_text()
    assert "2 of 2 attention layers replaced" in written
    assert "Perplexity on held-out text" in written


def test_a_student_that_does_without_its_linear_parts_is_no_conversion() -> None:
    values = {"teacher": 2.0, "student": 2.1, "linear part off": 2.2}
    said = page.verdict({"perplexity": values})
    assert said["converted"] is False
    assert said["verdict"].startswith("NOT A CONVERSION")
    assert page.verdict({"perplexity": values | {"linear part off": 2.4}})["converted"] is True


def test_the_folder_loads_generates_and_trains(student: tuple[Path, dict[str, Any]], book: Path) -> None:
    out, _ = student
    model: Any = AutoModelForCausalLM.from_pretrained(out)
    assert sorted(replaced(model)) == [0, 1]
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("the old sea", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=5, do_sample=False).shape == (1, 16)
    x = rows_of(book)
    before = model(x, labels=x, use_cache=False).loss
    before.backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    assert model(x, labels=x, use_cache=False).loss < before


def test_the_command_line_writes_with_it(student: tuple[Path, dict[str, Any]]) -> None:
    out, _ = student
    words = ["generate", str(out), "--prompt", "the old", "--steps", "6", "--temperature", "0"]
    first, second = (CliRunner().invoke(app, words) for _ in range(2))
    assert first.exit_code == 0, first.output
    assert first.output.startswith("the old")
    assert len(first.output) > len("the old\n")
    assert first.output == second.output
    refused = CliRunner().invoke(app, ["generate", str(out), "--count", "3"])
    assert refused.exit_code == 2
    assert "count='3' cannot work: accepted is --prompt, --steps" in refused.output


def test_the_command(teacher: Path, book: Path, tmp_path: Path) -> None:
    words = ["linearise", str(teacher), "--out", str(tmp_path / "s"), "--text", str(book), "--keep", "0.5"]
    words += ["--lengths", "16", "--rule", "linear"]
    for key, value in (SMALL | {"align_steps": 2, "distil_steps": 1}).items():
        words += [] if key == "keep" else ["--set", f"{key}={value}"]
    stopped = CliRunner().invoke(app, [*words, "--minutes", "1e-9"])
    assert stopped.exit_code == 0, stopped.output
    assert "time is up: step 0 of 3; the same call continues" in stopped.output
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "keeps softmax" in done.output
    report = json.loads((tmp_path / "s" / "linearise.json").read_text())
    (kept,) = (row for row in report["layers"] if row["softmax"])
    assert kept["kl"] == max(row["kl"] for row in report["layers"])
    again = CliRunner().invoke(app, words)  # finished: the same figures
    assert again.exit_code == 0
    assert json.loads((tmp_path / "s" / "linearise.json").read_text()) == report
    other = CliRunner().invoke(app, [*words, "--set", "seed=3"])
    assert other.exit_code == 2
    assert "begun with other settings: seed is 3, was 0" in " ".join(other.output.split())


# Legs


class Killed(BaseException):
    pass


def killing(function: Any, at: int) -> Any:
    """The function, which ends the run without warning at its n-th call."""
    calls = iter(range(at))

    def call(*args: Any, **named: Any) -> Any:
        if next(calls, None) is None:
            raise Killed
        return function(*args, **named)

    return call


@pytest.mark.parametrize("lora", [None, 2])
def test_a_run_that_is_killed_again_and_again_gives_the_same_student(
    teacher: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: int | None
) -> None:
    options: Any = SMALL | {"keep": 0.5, "lora": lora, "align_steps": 24, "distil_steps": 16}
    whole = linearise(teacher, tmp_path / "whole", book, measures=QUICK, **options)
    place = tmp_path / "legs"
    for name, at in (("align", 5), ("align", 2), ("sweep", 0), ("distil", 2), ("distil", 4)):
        with monkeypatch.context() as patch:
            patch.setattr(learn, name, killing(getattr(learn, name), at))
            with pytest.raises(Killed):
                linearise(teacher, place, book, measures=QUICK, **options)
    assert linearise(teacher, place, book, measures=QUICK, minutes=1e-9, **options) is None
    with monkeypatch.context() as patch:
        patch.setattr(run, "measure", killing(measure, 0))
        with pytest.raises(Killed):
            linearise(teacher, place, book, measures=QUICK, **options)
    legs = linearise(teacher, place, book, measures=QUICK, **options)
    assert whole is not None
    assert legs is not None
    for key in ("curves", "layers", "perplexity", "answers", "tokens"):
        assert legs[key] == whole[key]
    first, second = (load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", place))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert not (place / "work" / "checkpoints").exists()


def test_a_damaged_checkpoint_is_set_aside(
    teacher: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, output = tmp_path / "s", io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(learn, "align", killing(learn.align, 7))
        with pytest.raises(Killed):
            linearise(teacher, place, book, measures=QUICK, **SMALL)
    folder = place / "work" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_000003", "step_000006"]
    file = folder / "step_000006" / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    again = linearise(teacher, place, book, measures=QUICK, console=Console(file=output, width=500), **SMALL)
    assert "step_000006 is damaged" in output.getvalue()
    assert "it is now step_000006.damaged" in output.getvalue()
    whole = linearise(teacher, tmp_path / "whole", book, measures=QUICK, **SMALL)
    assert whole is not None
    assert again is not None
    assert again["curves"] == whole["curves"]


def test_a_signal_saves_first(teacher: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    def once(*args: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return align(*args)

    align = learn.align
    monkeypatch.setattr(learn, "align", once)
    with pytest.raises(Interrupted, match="interrupted at step 1") as stopped:
        linearise(teacher, tmp_path / "s", book, measures=QUICK, **SMALL)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert [path.name for path in (tmp_path / "s" / "work" / "checkpoints").iterdir()] == ["step_000001"]


def test_other_text_or_another_teacher_is_refused_on_resume(teacher: Path, book: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "s", tmp_path / "other.txt"
    assert linearise(teacher, out, book, minutes=1e-9, **SMALL) is None
    other.write_text(sentences(900))
    with pytest.raises(ValueError, match="these files differ"):
        linearise(teacher, out, other, **SMALL)
    with pytest.raises(ValueError, match=r"align_lr is 0\.1, was 0\.01"):
        linearise(teacher, out, book, **SMALL | {"align_lr": 0.1})


# How a student learns


@pytest.mark.parametrize(
    "how", [{"rule": "linear"}, {"rule": "linear", "window": 4}, {"window": 4}, {"lora": 2, "distil_lr": 3e-3}]
)
def test_every_way_of_learning(teacher: Path, book: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    report = linearise(teacher, tmp_path / "s", book, measures=QUICK, **SMALL | {"distil_steps": 12} | how)
    assert report is not None
    curve = [value for _, value in report["curves"]["distil"]]
    assert curve[-1] < curve[0]
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "s")
    x = rows_of(book)[:, :20]
    whole = model(x, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    parts = [model(x[:, t : t + 1], past_key_values=cache).logits for t in range(20)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


def test_a_window_over_everything_costs_nothing_and_needs_no_training(
    teacher: Path, book: Path, tmp_path: Path
) -> None:
    none = SMALL | {"align_steps": 0, "distil_steps": 0}
    report = linearise(teacher, tmp_path / "s", book, measures=QUICK, rule="window", window=64, **none)
    assert report is not None
    values = report["perplexity"]
    assert values["student"] == pytest.approx(values["teacher"], rel=1e-5)
    assert report["converted"] is None
    assert all(row["kl"] < 1e-6 for row in report["layers"])


def test_losses_are_those_of_torch_and_transformers(teacher: Path, book: Path) -> None:
    loaded = load_teacher(teacher, "cpu")
    x = rows_of(book)
    loss = loaded.model(x, labels=x, use_cache=False).loss
    assert learn.perplexity(loaded.model, x, PLAIN, 3) == pytest.approx(loss.exp().item(), rel=1e-5)
    torch.manual_seed(0)
    a, b = torch.randn(2, 3, 700, 5, dtype=torch.float64)
    wanted = (b.softmax(-1) * (b.log_softmax(-1) - a.log_softmax(-1))).sum(-1).mean()
    assert float(learn.divergence(a, b)) == pytest.approx(float(wanted), rel=1e-5)


def test_the_sweep_puts_everything_back(teacher: Path, book: Path) -> None:
    loaded = load_teacher(teacher, "cpu")
    x = rows_of(book)
    before = loaded.model(x, use_cache=False).logits
    layers = replaced(make_student(loaded, (0, 1), LineariseSettings()))
    own, costs = learn.sweep(loaded, layers, x, PLAIN, 2)
    assert torch.equal(loaded.model(x, use_cache=False).logits, before)
    assert own == pytest.approx(learn.perplexity(loaded.model, x, PLAIN, 4), rel=1e-5)
    alone = make_student(loaded, (1,), LineariseSettings())
    replaced(alone)[1].load_state_dict(layers[1].state_dict())
    kl = F.kl_div(
        alone(x, use_cache=False).logits.log_softmax(-1).flatten(0, 1), before.log_softmax(-1).flatten(0, 1),
        log_target=True, reduction="batchmean",
    )  # fmt: skip
    assert costs[1].kl == pytest.approx(kl.item(), rel=1e-4)


@pytest.mark.parametrize("window", [None, 4])
def test_switching_off_leaves_what_is_not_linear(teacher: Path, book: Path, window: int | None) -> None:
    loaded = load_teacher(teacher, "cpu")
    student = make_student(loaded, (0, 1), LineariseSettings(window=window))
    x, layers = rows_of(book), replaced(student)
    with torch.no_grad():
        for layer in layers.values():
            linear = getattr(layer.mixer, "other", layer.mixer)
            linear.out.weight.normal_()
        before = student(x, use_cache=False).logits
        with learn.switched_off(layers):
            off = student(x, use_cache=False).logits
        assert torch.equal(student(x, use_cache=False).logits, before)
        for layer in layers.values():
            getattr(layer.mixer, "other", layer.mixer).out.weight.zero_()
        torch.testing.assert_close(off, student(x, use_cache=False).logits)
    assert not torch.allclose(off, before)


def test_lora_changes_matrices_by_its_rank(teacher: Path, book: Path, tmp_path: Path) -> None:
    linearise(teacher, tmp_path / "s", book, measures=QUICK, **SMALL | {"lora": 2, "keep": 0.5})
    new, old = (load_file(folder / "model.safetensors") for folder in (tmp_path / "s", teacher))
    assert torch.equal(new["model.embed_tokens.weight"], old["model.embed_tokens.weight"])
    change = (new["model.layers.0.mlp.up_proj.weight"] - old["model.layers.0.mlp.up_proj.weight"]).double()
    sizes = torch.linalg.svdvals(change)
    assert sizes[1] > 1e3 * sizes[2]


def test_bytes_of_state(teacher: Path) -> None:
    student = make_student(load_teacher(teacher, "cpu"), (1,), LineariseSettings())
    cache = DynamicCache(config=student.config)
    student(torch.ones(3, 10, dtype=torch.int64), past_key_values=cache)
    heads, width = 4, 8
    linear = 3 * (4 * heads * width * width + 4 * 3 * 3 * 32 + 8)  # the sum, 3 inputs of q, k and v, the position
    assert state_bytes(cache) == (linear, 2 * 4 * 3 * 2 * width * 10)


# Text


def test_text_is_split_at_its_end_or_by_files(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    files = [tmp_path / f"{n:02d}.txt" for n in range(20)]
    for n, file in enumerate(files):
        file.write_text(chr(65 + n) * 100)
    assert text.text_files(tmp_path) == files
    parts = text.tokenise(files, tokenizer, 0.1, 10)
    held = {*parts.choose.tolist(), *parts.test.tolist()} - {0}
    assert held == {65 + 1, 65 + 11}
    assert not held & set(parts.train.tolist())
    assert len(parts.train) == 18 * 101
    one = text.tokenise(files[:1], tokenizer, 0.2, 10)
    assert [len(part) for part in one] == [81, 10, 10]


def test_a_long_text_keeps_every_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "PIECE", 50)
    (tmp_path / "a.md").write_text(sentences(10) + "x" * 120)
    parts = text.tokenise([tmp_path / "a.md"], byte_tokenizer(), 0.5, 1)
    assert bytes(torch.cat(parts).tolist()).decode() == (tmp_path / "a.md").read_text() + "\0"


def test_batches_depend_on_seed_and_step_alone() -> None:
    tokens = torch.arange(1000, dtype=torch.int32)
    first = text.batch(tokens, 4, 16, 1, 7)
    assert torch.equal(first, text.batch(tokens, 4, 16, 1, 7))
    assert not torch.equal(first, text.batch(tokens, 4, 16, 1, 8))
    assert torch.equal(first.diff(dim=1), torch.ones(4, 15, dtype=torch.int64))


# What is refused, with nothing written


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "nothing"
    yield path
    assert not path.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [0, 5]}, r"numbers from 0 to 1, without \[5\]"),
        ({"layers": []}, "different numbers of layers"),
        ({"keep": 0.5, "layers": [0]}, None),
        ({"keep": 0.99, "layers": [1]}, None),
        ({"keep": 1.0}, r"a share in \[0, 1\)"),
        ({"rule": "wavelets"}, "gated_delta"),
        ({"rule": "window"}, "a number of tokens with"),
        ({"window": 0}, "window"),
        ({"align_length": 100_000}, "text is too short: 1 files have"),
        ({"align_lr": 0.0}, "positive"),
        ({"minutes": -1.0}, "minutes"),
        ({"device": "abacus"}, "device"),
    ],
)
def test_wrong_settings(teacher: Path, book: Path, out: Path, options: dict[str, Any], message: str | None) -> None:
    if message is None:  # one layer may be replaced, and the other keeps softmax: this works
        LineariseSettings(**options)
        return
    with pytest.raises(ValueError, match=message):
        linearise(teacher, out, book, **{**SMALL, **options})


def test_keep_must_leave_a_layer(teacher: Path, book: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from subquad.hf.linearise import models

    monkeypatch.setattr(models, "kept_of", lambda *_: 2)
    with pytest.raises(ValueError, match="a share that leaves a layer to replace"):
        linearise(teacher, out, book, **SMALL)


def test_an_unknown_setting(teacher: Path, book: Path, out: Path) -> None:
    with pytest.raises(TypeError, match="steps_of_alignment"):
        linearise(teacher, out, book, steps_of_alignment=3)


def test_missing_or_unreadable_text(teacher: Path, out: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a file or folder that exists"):
        linearise(teacher, out, tmp_path / "no.txt", **SMALL)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="a folder with files that end in"):
        linearise(teacher, out, tmp_path / "empty", **SMALL)
    (tmp_path / "b.txt").write_bytes(b"good \xff bad")
    with pytest.raises(ValueError, match="byte 5 is not UTF-8"):
        linearise(teacher, out, tmp_path / "b.txt", **SMALL)


def test_models_that_are_no_decoders_or_have_no_tokenizer(teacher: Path, book: Path, out: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    for name, model in (
        ("bert", BertLMHeadModel(BertConfig(vocab_size=256, is_decoder=False, **sizes))),
        ("t5", T5ForConditionalGeneration(T5Config(vocab_size=256, d_model=16, d_kv=8, num_layers=1, num_heads=2))),
    ):
        model.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
        with pytest.raises(ValueError, match="a causal decoder"):
            linearise(tmp_path / name, out, book, **SMALL)
    AutoModelForCausalLM.from_pretrained(teacher).save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"a folder with a tokenizer, but it has none of tokenizer\.json"):
        linearise(tmp_path / "bare", out, book, **SMALL)
    (tmp_path / "void").mkdir()
    with pytest.raises(ValueError, match=r"a folder with config\.json"):
        linearise(tmp_path / "void", out, book, **SMALL)
    with pytest.raises(ValueError, match="a folder that exists"):
        linearise(tmp_path / "nowhere", out, book, **SMALL)


def test_a_student_is_no_teacher(student: tuple[Path, dict[str, Any]], book: Path, out: Path) -> None:
    with pytest.raises(ValueError, match="one without replaced layers"):
        linearise(student[0], out, book, **SMALL)


def test_a_folder_with_other_files_is_left_alone(teacher: Path, book: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="an empty folder, or that of an earlier call"):
        linearise(teacher, tmp_path / "mine", book, **SMALL)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_the_names_are_public() -> None:
    assert {"linearise", "LineariseSettings", "Measures"} <= set(subquad.hf.__all__)
