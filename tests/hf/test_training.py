"""transformers' Trainer, checkpointing, PEFT and pipelines, and torch's wrappers, around our models."""

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("transformers", reason="needs the extra: pip install 'subquad[hf]'")

from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, pipeline

import subquad
from subquad.hf import convert, unwrap, wrap
from subquad.mechanisms import MECHANISMS
from subquad.models import Classifier, LanguageModel, blocks
from tests.hf.tiny import VOCAB, make, padded

# the older name of activation checkpointing, which all versions of transformers 5 know
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")

TEXT = "The sea was grey and the ships lay still. " * 40


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1,
        per_device_train_batch_size=4, learning_rate=1e-2, seed=1, **more,
    )  # fmt: skip


def windows(size: int) -> list[dict[str, list[int]]]:
    ids = list(TEXT.encode())
    return [{"input_ids": ids[i : i + size], "labels": ids[i : i + size]} for i in range(0, len(ids) - size, size)]


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def text_model(**fields: Any) -> LanguageModel:
    torch.manual_seed(0)
    sizes = {"vocab": 256, "dim": 32, "depth": 2, "heads": 4, "mechanism": "linear, local", "positions": "none"}
    return LanguageModel(**{**sizes, **fields})


def test_the_trainer_learns_saves_and_resumes(tmp_path: Path) -> None:
    data = windows(48)
    model = wrap(text_model())
    args = arguments(tmp_path / "run", max_steps=12, gradient_accumulation_steps=2)
    args.set_save(strategy="steps", steps=6)
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:4])
    trainer.train()
    learned = losses(trainer)
    assert learned[-1] < 0.6 * learned[0]
    assert 5 < learned[0] < 6  # log 256 = 5.5: divided by the number of targets, over both parts of a step
    evaluated = trainer.evaluate()["eval_loss"]
    tokens = torch.tensor([row["input_ids"] for row in data[:4]])
    with torch.no_grad():
        assert evaluated == pytest.approx(float(unwrap(model).eval().loss(tokens)), rel=1e-4)
    trainer.save_model(str(tmp_path / "trained"))
    ours = subquad.load(tmp_path / "trained")
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), unwrap(model)(tokens))
    checkpoint = tmp_path / "run" / "checkpoint-6"
    assert isinstance(subquad.load(checkpoint), LanguageModel)
    again = Trainer(model=wrap(text_model()), args=args, train_dataset=data)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert losses(again)[-1] == pytest.approx(learned[-1], rel=1e-4)


def test_a_step_of_the_trainer_equals_a_step_of_torch(tmp_path: Path) -> None:
    data = windows(32)[:4]
    theirs, ours = wrap(text_model()), text_model()
    args = arguments(tmp_path, max_steps=1, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0)
    Trainer(model=theirs, args=args, train_dataset=data).train()
    optimiser = torch.optim.SGD(ours.parameters(), lr=1e-2)
    ours.loss(torch.tensor([row["input_ids"] for row in data])).backward()
    optimiser.step()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(theirs.get_parameter(name), parameter, rtol=1e-4, atol=1e-6)


def test_a_classifier_in_the_trainer(tmp_path: Path) -> None:
    """Rows of different lengths, padded on the left by the collator."""
    torch.manual_seed(0)
    model = Classifier(classes=2, vocab=256, dim=16, depth=1, heads=2, mechanism="nystrom")
    convert_to = tmp_path / "model"
    model.save(tmp_path / "plain")
    tokenizer = AutoTokenizer.from_pretrained(convert(tmp_path / "plain", convert_to, tokenizer="bytes"))
    texts = [("all good" * n, 1) for n in range(1, 9)] + [("bad" * n, 0) for n in range(1, 9)]
    data = [{**tokenizer(text), "labels": label} for text, label in texts]
    theirs = wrap(subquad.load(convert_to))
    trainer = Trainer(
        model=theirs, args=arguments(tmp_path / "run", max_steps=12), train_dataset=data, processing_class=tokenizer
    )
    trainer.train()
    assert losses(trainer)[-1] < 0.3
    assert trainer.predict(data).predictions.argmax(-1).tolist() == [label for _, label in texts]
    judge = pipeline("text-classification", model=theirs, tokenizer=tokenizer)
    assert [answer["label"] for answer in judge(["bad bad", "all good"])] == ["LABEL_0", "LABEL_1"]


@pytest.mark.parametrize("kind", ["hybrid", "constant, taps"])
def test_checkpointing_recomputes_and_changes_no_gradient(kind: str) -> None:
    model = make(kind).train()
    theirs, ids = wrap(model), torch.randint(VOCAB, (2, 9))
    theirs(ids, labels=ids).loss.backward()
    plain = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    calls: list[int] = []
    hook = model.transformer.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    theirs.gradient_checkpointing_enable({"use_reentrant": False})
    assert theirs.is_gradient_checkpointing
    theirs(ids, labels=ids).loss.backward()
    assert len(calls) == 2
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name])
    theirs.gradient_checkpointing_disable()
    theirs(ids, labels=ids).loss.backward()
    assert len(calls) == 3
    hook.remove()
    with pytest.raises(ValueError, match="use_reentrant=True cannot work"):
        theirs.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="every_n_layers=2 cannot work"):
        theirs._set_gradient_checkpointing(every_n_layers=2)
    reversible = wrap(LanguageModel(vocab=5, dim=8, depth=2, heads=2, reversible=True))
    with pytest.raises(ValueError, match="reversible=True recomputes every block already"):
        reversible.gradient_checkpointing_enable()


def test_pipeline_writes_text(tmp_path: Path) -> None:
    model = text_model().eval()
    with torch.no_grad():
        model.head.bias[ord("a") : ord("z") + 1] += 9  # letters, each of one byte
    model.save(tmp_path / "plain")
    out = convert(tmp_path / "plain", tmp_path / "model", tokenizer="bytes")
    write = pipeline("text-generation", model=str(out), device="cpu")
    prompts = ["The sea", "Ships", "A"]
    tokens = [model.generate(list(prompt.encode()), 8, temperature=0).tolist() for prompt in prompts]
    wanted = [bytes(row).decode() for row in tokens]
    for size in (1, 3):
        found = write(prompts, max_new_tokens=8, do_sample=False, return_full_text=False, batch_size=size)
        assert [answer[0]["generated_text"] for answer in found] == wanted
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    words = {"max_new_tokens": 8, "do_sample": False, "stop_strings": wanted[2][1], "tokenizer": tokenizer}
    assert theirs.generate(**tokenizer("A", return_tensors="pt"), **words).shape[1] <= 3


@pytest.mark.parametrize("name", [name for name, cls in MECHANISMS.items() if cls.traits.causal])
def test_lora_on_every_projection(name: str, tmp_path: Path) -> None:
    """Adapters change forward, prefill and step alike: as if their product were added to the weights."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(0)
    options = MECHANISMS[name].small[0]
    model = LanguageModel(vocab=VOCAB, dim=16, depth=1, heads=4, mechanism=(name, options), max_length=40).eval()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    targets = [key for key, module in model.named_modules() if isinstance(module, nn.Linear) and key != "head"]
    config = peft.LoraConfig(r=2, target_modules=targets, modules_to_save=["head", "embedding"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(wrap(model), config).eval()
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_" in key or "modules_to_save" in key:
                parameter.normal_(std=0.3)
    ids, mask = padded([torch.randint(VOCAB, (size,)) for size in (4, 9)], "left")
    with torch.no_grad():
        logits = adapted(input_ids=ids, attention_mask=mask, use_cache=False).logits
        cache = model_of(adapted).make_cache()
        parts = [adapted(input_ids=ids[:, :6], attention_mask=mask[:, :6], past_key_values=cache).logits]
        for at in range(6, 9):
            seen = mask[:, : at + 1]
            parts.append(adapted(input_ids=ids[:, at : at + 1], attention_mask=seen, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(parts, 1)[:, 5:], logits[:, 5:], rtol=1e-3, atol=1e-4)
    adapted.save_pretrained(str(tmp_path))
    merged = adapted.merge_and_unload()
    with torch.no_grad():
        again = merged(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(again, logits, rtol=1e-3, atol=1e-4)
    changed = [key for key in before if not torch.equal(before[key], unwrap(merged).state_dict()[key])]
    assert {f"{key}.weight" for key in targets} <= set(changed)
    fresh = LanguageModel(model.config)
    fresh.load_state_dict(before)
    loaded = peft.PeftModel.from_pretrained(wrap(fresh.eval()), str(tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(input_ids=ids, attention_mask=mask, use_cache=False).logits, logits, rtol=1e-3, atol=1e-4
        )


def test_lora_where_only_some_outputs_of_a_projection_are_needed() -> None:
    """Layers that pool ask for queries and keys apart."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(0)
    model = Classifier(classes=2, vocab=VOCAB, dim=16, depth=2, heads=2, mechanism="linear", pool=(1, 2)).eval()
    adapted = peft.get_peft_model(wrap(model), peft.LoraConfig(r=2, target_modules=["qkv"], task_type="SEQ_CLS")).eval()
    ids = torch.randint(VOCAB, (2, 9))
    with torch.no_grad():
        plain = adapted(input_ids=ids).logits
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_()
        logits = adapted(input_ids=ids).logits
        assert not torch.allclose(logits, plain)
        torch.testing.assert_close(adapted.merge_and_unload()(ids).logits, logits, rtol=1e-3, atol=1e-4)


def test_a_replaced_layer_is_called_in_a_step_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused feed-forward of a step reads weights, so it may only be used for plain layers."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    monkeypatch.setattr(blocks, "pays", lambda *_: True)  # as on a GPU
    model = make("constant")
    config = peft.LoraConfig(r=2, target_modules=["inner", "out"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(wrap(model), config).eval()
    ids = torch.randint(VOCAB, (2, 5))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_()
        cache = model_of(adapted).make_cache()
        parts = [adapted(input_ids=ids[:, at : at + 1], past_key_values=cache).logits for at in range(5)]
        whole = adapted(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-3, atol=1e-4)


def model_of(adapted: Any) -> Any:
    return adapted.base_model.model


def test_lora_in_the_trainer(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    config = peft.LoraConfig(r=4, target_modules=["qkv", "out", "inner"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(wrap(text_model()), config)
    frozen = unwrap(model_of(adapted)).embedding.weight.detach().clone()
    args = arguments(tmp_path / "run", max_steps=8, gradient_checkpointing=True)
    trainer = Trainer(model=adapted, args=args, train_dataset=windows(48))
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]
    merged = unwrap(adapted.merge_and_unload())
    assert torch.equal(merged.embedding.weight, frozen)
    merged.save(tmp_path / "merged")
    assert isinstance(subquad.load(tmp_path / "merged"), LanguageModel)


def test_accelerate_and_the_names_it_wraps_by() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = make("constant").train()
    theirs = wrap(model)
    kinds = {type(module).__name__ for module in model.modules()}
    assert set(theirs._no_split_modules) <= kinds
    names = dict(model.named_modules())
    for rule in theirs.fsdp_plan:
        assert rule.replace("*", "0") in names
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimiser = accelerator.prepare(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1))
    ids = torch.randint(VOCAB, (2, 6))
    before = model.embedding.weight.detach().clone()
    accelerator.backward(prepared(ids, labels=ids).loss)
    optimiser.step()
    assert not torch.equal(before, model.embedding.weight)


def test_distributed_data_parallel(tmp_path: Path) -> None:
    """In a group of one process: every parameter gets its gradient, and the loss is that of the model."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        theirs = wrap(make("hybrid").train())
        wrapped = nn.parallel.DistributedDataParallel(theirs)
        ids = torch.randint(VOCAB, (2, 9))
        output = wrapped(ids, labels=ids)
        output.loss.backward()
        assert all(parameter.grad is not None for parameter in theirs.parameters())
        torch.testing.assert_close(output.loss, unwrap(theirs).loss(ids))
    finally:
        dist.destroy_process_group()


def test_copies_have_a_core_of_their_own() -> None:
    """Copies, pickles, and the replicas that torch.nn.DataParallel makes on other GPUs."""
    theirs, ids = wrap(make("constant")), torch.randint(VOCAB, (2, 5))
    file = io.BytesIO()
    torch.save(theirs, file)
    file.seek(0)
    for other in (copy.deepcopy(theirs), torch.load(file, weights_only=False)):
        with torch.no_grad():
            theirs.embedding.weight.add_(1)
            assert not torch.allclose(other(ids).logits, theirs(ids).logits)
            other.embedding.weight.add_(1)
            torch.testing.assert_close(other(ids).logits, theirs(ids).logits)
            theirs.embedding.weight.sub_(1)
    replica = theirs._replicate_for_data_parallel()
    replica.head = nn.Linear(16, VOCAB)
    assert replica.core.head is replica.head is not theirs.head
    assert theirs.core.head is theirs.head


def test_our_training_and_theirs_know_the_same_weights(tmp_path: Path) -> None:
    """A model that wrap() made trains in place, and its own file has what was learned."""
    model = text_model()
    Trainer(model=wrap(model), args=arguments(tmp_path, max_steps=2), train_dataset=windows(32)).train()
    model.save(tmp_path / "model")
    header = json.loads((tmp_path / "model" / "config.json").read_text())
    assert header["architectures"] == ["SubquadForCausalLM"]
    tokens = torch.tensor([windows(32)[0]["input_ids"]])
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        torch.testing.assert_close(theirs(tokens).logits, model.eval()(tokens))
