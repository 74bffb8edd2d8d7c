"""Trainer and loops of accelerate on two ranks, by DDP and by FSDP, learn what one process learns."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

import subquad.hf
from subquad.models import Classifier, LanguageModel
from subquad.ops import Global, Local
from tests.training.tiny import start

TEXT = list(("The sea was grey and the ships lay still. " * 10).encode())
DATA = [{"input_ids": TEXT[i : i + 24], "labels": TEXT[i : i + 24]} for i in range(0, 384, 24)]
LABELLED = [{"input_ids": TEXT[i : i + 8], "labels": i % 2} for i in range(16)]
PROMPT = torch.tensor([TEXT[:8]])
SIZES: dict[str, Any] = {"vocab": 256, "dim": 16, "depth": 2, "heads": 2, "max_length": 64}
TIED: dict[str, Any] = {"mechanism": "softmax, local", "positions": "learned", "tie": True}
# what a job trains, and how it is distributed over two ranks
JOBS: dict[str, tuple[dict[str, Any] | str, str]] = {
    "ddp": ({"mechanism": "linear, local"}, "ddp"),
    "fsdp": ({"mechanism": "linear, local"}, "fsdp"),
    "tied": (TIED, "fsdp"),
    "checkpointed": (TIED, "fsdp, checkpointed"),
    "reversible": ({"mechanism": "linear", "reversible": True}, "fsdp"),
    "classifier": ("classifier", "fsdp"),
    "replaced": ("replaced", "fsdp"),
}


def make(kind: dict[str, Any] | str) -> Any:
    torch.manual_seed(0)
    if isinstance(kind, dict):
        return subquad.hf.wrap(LanguageModel(**SIZES, **kind))
    if kind == "classifier":
        return subquad.hf.wrap(Classifier(classes=2, mechanism="nystrom", **SIZES))
    small = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**small, num_attention_heads=2, num_key_value_heads=1, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=subquad.hf.register(Local(6) | Global(2)))
    subquad.hf.replace(model, layers=[1], mechanism="gated_deltanet")
    return model


def shard_on_cpus() -> None:
    """accelerate shards models on GPUs only, but over gloo it can do the same, if it does not know."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def train(folder: Path, kind: dict[str, Any] | str, how: str, world: int) -> dict[str, Any]:
    """What a run of the Trainer logs, and the tokens that its model generates without leaving the ranks."""
    more: dict[str, Any] = {}
    if "fsdp" in how and world > 1:
        more = {"fsdp": "full_shard", "fsdp_config": {"activation_checkpointing": "checkpointed" in how}}
    args = TrainingArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1,
        per_device_train_batch_size=4 // world, learning_rate=1e-2, adam_epsilon=1e-3, seed=1, max_steps=3, **more,
    )  # fmt: skip
    if more:
        shard_on_cpus()
    trainer = Trainer(model=make(kind), args=args, train_dataset=LABELLED if kind == "classifier" else DATA)
    trainer.train()
    assert trainer.is_fsdp_enabled == bool(more)
    trainer.save_model(str(folder))
    model = trainer.model.eval()
    tokens = model.generate(PROMPT, max_new_tokens=5, do_sample=False).tolist() if model.can_generate() else None
    return {"losses": [line["loss"] for line in trainer.state.log_history if "loss" in line], "tokens": tokens}


def loop(kind: dict[str, Any]) -> list[float]:
    """Losses of a plain loop, sharded and in 16 bits."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    shard_on_cpus()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision="bf16")
    model: Any = make(kind)
    model, optimiser = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
    rows = torch.tensor([row["input_ids"] for row in DATA[dist.get_rank() * 4 :][:4]])
    losses = []
    for _ in range(3):
        loss = model(rows, labels=rows).loss
        accelerator.backward(loss)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss))
    model.eval()
    with pytest.raises(ValueError, match="use_cache=True cannot work: accepted is False where FSDP"):
        model(rows, use_cache=True)
    return losses


def _work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")  # as torchrun does
    os.environ.update(MASTER_ADDR="127.0.0.1", ACCELERATE_USE_CPU="true")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    said: dict[str, Any] = {name: train(folder / name, *job, 2) for name, job in JOBS.items()}
    said["loop"] = [loop({"mechanism": "linear, local"}), loop(TIED)]
    (folder / f"{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an orderly exit


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [start(_work, rank, folder) for rank in range(2)]
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", JOBS)
def test_two_ranks_learn_what_one_learns(name: str, said: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    folder, (first, second) = said
    alone = train(tmp_path, *JOBS[name], 1)
    assert first[name]["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert first[name]["tokens"] == second[name]["tokens"] == alone["tokens"]
    kind = JOBS[name][0]
    if kind == "replaced":
        saved = AutoModelForCausalLM.from_pretrained(folder / name)
        assert saved.generate(PROMPT, max_new_tokens=5, do_sample=False).tolist() == alone["tokens"]
    else:
        trained, whole = subquad.load(tmp_path), subquad.load(folder / name)
        for key, tensor in whole.state_dict().items():
            torch.testing.assert_close(tensor, trained.state_dict()[key], rtol=1e-3, atol=1e-5)


def test_a_loop_in_16_bits(said: tuple[Path, list[dict[str, Any]]]) -> None:
    for losses in said[1][0]["loop"]:
        assert losses[-1] < losses[0] - 0.2
