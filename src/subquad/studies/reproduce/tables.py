"""The published tables that `subquad reproduce` runs. A row has a mechanism, its training, and the paper's figures.

Settings are those of the papers if a budget of minutes on one GPU allows it; `differs` lists the exceptions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from subquad.studies.published import printed
from subquad.studies.reproduce.scaling import REFORMER_4
from subquad.tasks.images import SPARSE_CIFAR10, SPARSE_IMAGENET64

Settings = Mapping[str, Any]
LINEAR = "Katharopoulos et al. 2020, arXiv:2006.16236"
SPARSE = "Child et al. 2019, arXiv:1904.10509"
ZOOLOGY = "Arora et al. 2023, arXiv:2312.04927"


@dataclass(frozen=True)
class Row:
    name: str
    mechanism: Any  # as models take it; "lstm" for the recurrent baseline
    published: Mapping[str, float] = field(default_factory=dict)  # by the name of the measure
    model: Settings = field(default_factory=dict)
    data: Settings = field(default_factory=dict)
    training: Settings = field(default_factory=dict)
    variant: str = ""  # how it differs from other rows of its mechanism: "width 64"

    @property
    def plain(self) -> str:
        """The name of the mechanism, without its options."""
        return self.mechanism if isinstance(self.mechanism, str) else str(self.mechanism[0])


@dataclass(frozen=True, kw_only=True)
class Table:
    name: str
    title: str
    source: str
    task: str
    metric: str  # of ours and of the published figure
    rows: Sequence[Row]
    kind: Literal["train", "scaling", "context"] = "train"
    data: Settings = field(default_factory=dict)
    model: Settings = field(default_factory=dict)
    training: Settings = field(default_factory=dict)
    iterations: Sequence[str] = ()  # rows whose iterations are timed, relative to the first one
    states: bool = False  # whether the numbers in each row's state are counted
    differs: Sequence[str] = ()


def lsh(rounds: int, chunk: int) -> tuple[str, dict[str, Any]]:
    return "reformer", {"rounds": rounds, "chunk": chunk, "buckets": 64}


# post-norm with ten times the paper's lr and batch: warm up, then decay to zero at the end of the time. AdamW with a
# warm-up replaces RAdam, which has a warm-up built in, because torch runs AdamW as one kernel for all parameters
ADAMW: Settings = {"optimiser": "adamw", "schedule": "cosine", "weight_decay": 0.01}
SHORT: Settings = {**ADAMW, "batch": 128, "lr": 1e-3, "betas": [0.9, 0.98], "warmup": 1000, "compile": True}
SPARSE_TRAINING: Settings = {**ADAMW, "betas": [0.9, 0.95], "clip_by": "norm", "warmup": 500, "lr": 3.5e-4}
GRAPH: Settings = {"capture": True}  # without a graph, a step on a GPU waits for kernel launches
# a model of the same size, built as one would today: pre-norm, positions of rows, columns and channels, a convolution
# over a few neighbours before each attention (`taps`), and a logit for each value instead of a mixture, which learns
# worse at ten times the paper's lr because its gradients grow with 1 / scale
TODAY: Settings = {"positions": "waves", "norm_position": "pre", "activation": "gelu", "mixture": None}
NEAR: Settings = {"positions": "rotary", "taps": list(range(1, 8))}  # frames of speech know which others are near
FULL: Settings = {"precision": "fp32"}  # under autocast cuDNN's LSTM uses float16, where gradients of sums overflow
NO_DROPOUT: Settings = {"dropout": 0.0, "ff_dropout": 0.0, "attention_dropout": 0.0}
STRIDED_TEXT, FIXED_TEXT = ("strided", {"stride": 128}), ("fixed", {"block": 128, "summary": 32})
SPARSE_152M, MUSIC = "Sparse Transformer 152M (strided)", "Classical music, 5 s at 12 kHz"
AUDIO: dict[str, Any] = {  # of Row
    "data": {"set": "audio", "length": 16384},
    "model": {"dim": 512, "depth": 12, "heads": 8, "dropout": 0.1},
    "training": {"batch": 4},
}


def sparse_image(name: str, label: str, mechanism: Any) -> Row:
    """The Sparse Transformer's model of CIFAR-10."""
    return Row(
        f"sparse-{name}",
        mechanism,
        printed("sparse-speed", label, "bits/dim", "iteration_s", first=3),
        model={k: v for k, v in SPARSE_CIFAR10.items() if k != "mechanism"},
        training={**SPARSE_TRAINING, "batch": 16, "micro_batch": 8, "warmup": 5000, "steps": 360_000},
    )


# linear and gated rules, delta rules, and softmax, which keeps every token and so is the ceiling
RECALLERS = ("linear", "retnet", "gla", "mamba2", "deltanet", "gated_deltanet", "softmax")
RECALL_WIDTHS = (32, 64, 128)  # with one head the state of linear and deltanet is the square of it


_TABLES = (
    Table(
        name="mnist",
        title="MNIST, pixel by pixel",
        source=f"{LINEAR}, Table 1",
        task="images",
        metric="bits/dim",
        data={"set": "mnist"},
        model={**NO_DROPOUT, "dropout": 0.05},
        training={**SHORT, "steps": 115_000, "evaluate_batch": 250},
        rows=(
            Row("linear", "linear", printed("mnist", "Linear", "bits/dim"), training=GRAPH),
            Row("softmax", "softmax", printed("mnist", "Softmax", "bits/dim"), training=GRAPH),
            Row("reformer-1", lsh(1, 29), printed("mnist", "LSH-1", "bits/dim")),
            Row("reformer-4", lsh(4, 29), printed("mnist", "LSH-4", "bits/dim")),
            Row("linear-taps", "linear", model={**TODAY, "taps": [1, 2, 3, 27, 28, 29, 56]}, training=GRAPH),
            Row("strided", ("strided", {"stride": 28})),
            Row("fixed", ("fixed", {"block": 28, "summary": 7})),
        ),
        iterations=("softmax", "fixed", "strided", "linear"),
        differs=(
            "batch 128, AdamW at 1e-3 with warm-up and cosine decay to the end of the time budget; theirs: batch 10, "
            "RAdam at 1e-4 for 250 epochs",
            "half the dropout, only on the layers' outputs, because training lasts only some tens of epochs",
            "linear-taps: the same size, built as one would today: pre-norm, GELU, positions of rows and columns, a "
            "convolution over seven neighbours (left and above) before each attention, 256 logits, no mixture",
            "the first pixel is predicted too, from a start token",
            "reformer: our buckets depend on past tokens only; theirs also depend on future ones",
        ),
    ),
    Table(
        name="cifar10",
        title="CIFAR-10, byte by byte",
        source=f"{LINEAR}, Table 2; {SPARSE}, Table 2",
        task="images",
        metric="bits/dim",
        data={"set": "cifar10", "validation": 2000},
        model=NO_DROPOUT,
        training={**SHORT, "batch": 64, "lr": 5e-4, "warmup": 2000, "steps": 75_000, "evaluate_batch": 50},
        rows=(
            Row("linear", "linear", printed("cifar10", "Linear", "bits/dim"), training=GRAPH),
            Row("softmax", "softmax", printed("cifar10", "Softmax", "bits/dim"), training=GRAPH),
            Row("reformer-1", lsh(1, 37), printed("cifar10", "LSH-1", "bits/dim")),
            Row("reformer-4", lsh(4, 37), printed("cifar10", "LSH-4", "bits/dim")),
            Row(
                "linear-taps",
                "linear",
                model={**TODAY, "taps": [1, 2, 3, 6, 93, 96, 99]},
                training={**GRAPH, "batch": 32, "lr": 2e-3, "warmup": 1000, "steps": 150_000, "evaluate_every": 2000},
            ),
            sparse_image("dense", "Dense attention", "softmax"),
            sparse_image("fixed", "Fixed", ("fixed", {"block": 96, "summary": 24})),
            sparse_image("strided", "Strided", ("strided", {"stride": 96})),
        ),
        iterations=("sparse-dense", "sparse-fixed", "sparse-strided"),
        differs=(
            "time: theirs one GPU week (a P40), the sparse ones 120 epochs on eight V100",
            "no dropout: a few epochs do not need it",
            "sparse: queries and keys of full width, 67.6 million parameters; theirs of half, 59 million",
            "batch 64, AdamW at 5e-4 (linear-taps: 32 at 2e-3) with warm-up and cosine decay to the end of the time "
            "budget; theirs RAdam at 1e-4",
            "linear-taps: the same size, built as one would today: pre-norm, GELU, positions of rows, columns and "
            "channels, a convolution over seven neighbours (left and above) before each attention, 256 logits",
            "2,000 training images are held out to choose the checkpoint",
        ),
    ),
    Table(
        name="copy",
        title="The causal copy task: 10 symbols, length 128",
        source=f"{LINEAR}, Figure 2",
        task="copy",
        metric="bits/symbol",
        rows=(
            Row("linear", "linear", training=GRAPH),
            Row("softmax", "softmax", training=GRAPH),
            Row("reformer-4", ("reformer", REFORMER_4)),
            Row("lstm", "lstm", training=FULL),
            Row("deltanet", "deltanet", training=GRAPH),
            Row("gated_deltanet", "gated_deltanet", training=GRAPH),
        ),
        differs=(
            "the paper prints curves, not figures: linear reaches the loss of softmax, LSH does not",
            "an LSTM of the same width and depth is added, and two mechanisms with delta rules",
        ),
    ),
    Table(
        name="recall",
        title="Key-value recall (MQAR): what a state can hold",
        source=f"{ZOOLOGY}, Figure 2, in the form of Arora et al. 2024, arXiv:2402.18668, Figure 2",
        task="recall",
        metric="accuracy",
        data={"length": 256, "pairs": [4, 8, 16, 32, 64]},
        training={"steps": 4000, "batch": 256, "lr": 2e-3, "evaluate_batches": 2, **GRAPH},
        rows=tuple(
            Row(f"{name}-{width}", name, model={"dim": width}, variant=f"width {width}")
            for width in RECALL_WIDTHS
            for name in RECALLERS
        ),
        states=True,
        differs=(
            "the papers print curves, not figures",
            "every row sees the same batches in the same order, at one lr; theirs are the best of four lr",
            "one model is asked for 4 to 64 pairs in 256 tokens; 1,024 tokens instead of 8,192",
            "two layers with a convolution over three tokens before each mixer, and feed-forward parts",
        ),
    ),
    Table(
        name="scaling",
        title="Time and memory a sample, forward and backward of one causal layer",
        source=f"{LINEAR}, Figure 1",
        task="scaling",
        metric="training_ms",
        kind="scaling",
        rows=(
            Row("linear", "linear"),
            Row("softmax", "softmax", {"longest": 4096.0}),
            Row("reformer-4", "reformer-4", {"longest": 16384.0}),
            Row("lstm", "lstm"),
        ),
        differs=(
            "the paper prints curves, and the longest N that fits into 11 GB of a GTX 1080 Ti",
            "softmax here is a flash kernel, which does not keep the N x N matrix",
        ),
    ),
    Table(
        name="enwik8",
        title="Bytes of Wikipedia, context 12,288",
        source=f"{SPARSE}, Tables 1 and 2",
        task="text",
        metric="bits/byte",
        data={"set": "enwik8", "length": 12288},
        model={"dim": 512, "depth": 30, "heads": 8, "dropout": 0.1, "positions": "grid"},
        training={**SPARSE_TRAINING, "batch": 8, "micro_batch": 4, "steps": 75_000, "evaluate_batch": 8},
        rows=(
            Row("dense", "softmax", printed("sparse-speed", "Dense attention", "bits/byte", "iteration_s")),
            Row("fixed", FIXED_TEXT, printed("sparse-speed", "Fixed", "bits/byte", "iteration_s")),
            Row("strided", STRIDED_TEXT, printed("sparse-speed", "Strided", "bits/byte", "iteration_s")),
            Row("linear", "linear"),
            Row(
                "transformer_xl",
                ("transformer_xl", {"memory": 512}),
                printed("sparse", "Transformer-XL 88M", "bits/byte", first=1),
                model={"positions": "none"},
            ),
        ),
        iterations=("dense", "fixed", "strided", "linear"),
        differs=(
            "theirs: 80 epochs of 90 MB on eight V100, dropout 0.40; their dense attention keeps the whole matrix",
        ),
    ),
    Table(
        name="context",
        title="The least context while evaluating",
        source=f"{SPARSE}, Table 3",
        task="text",
        metric="bits/byte",
        kind="context",
        rows=tuple(
            Row(f"{n:,}", FIXED_TEXT, {**printed("sparse-context", f"{n:,} tokens", "bits/byte"), "context": n})
            for n in (6144, 9216, 10752, 11904, 12096, 12160)
        ),
        differs=("the model is the row `fixed` of the table enwik8, trained as far as it was there",),
    ),
    Table(
        name="imagenet64",
        title="ImageNet 64 x 64, byte by byte",
        source=f"{SPARSE}, Table 1",
        task="images",
        metric="bits/dim",
        data={"set": "imagenet64", "validation": 2000},
        model={k: v for k, v in SPARSE_IMAGENET64.items() if k != "mechanism"},
        training={**SPARSE_TRAINING, "batch": 16, "warmup": 5000, "steps": 600_000, "evaluate_batch": 8},
        rows=(
            Row("strided", STRIDED_TEXT, printed("sparse", SPARSE_152M, "bits/dim", first=1, data="ImageNet 64x64")),
            Row("linear", "linear"),
        ),
        differs=("theirs: 70 epochs on 64 V100 for seven days",),
    ),
    Table(
        name="music",
        title="Music: chorales note by note, audio sample by sample",
        source=f"{SPARSE}, Table 1 and §7.4",
        task="music",
        metric="bits/token",
        rows=(
            Row("chorales-strided", ("strided", {"stride": 64}), data={"set": "chorales"}),
            Row("chorales-linear", "linear", data={"set": "chorales"}),
            Row(
                "audio-strided",
                STRIDED_TEXT,
                printed("sparse", SPARSE_152M, "bits/token", first=1, data=MUSIC),
                **AUDIO,
            ),
            Row("audio-linear", "linear", **AUDIO),
        ),
        differs=(
            "theirs: five seconds of classical piano at 12 kHz, 65,536 samples, 152 million weights",
            "ours: four-part chorales on a grid, and spoken digits at 8 kHz, because we lack their recordings",
        ),
    ),
    Table(
        name="speech",
        title="Speech: CTC over phones",
        source=f"{LINEAR}, Table 3 (Wall Street Journal, 80 hours)",
        task="speech",
        metric="per",
        data={"set": "an4", "stack": 4},
        model={"convolutions": 2},
        training={**ADAMW, "betas": [0.9, 0.98], "lr": 1e-3, "warmup": 500, "steps": 10_000},
        rows=(
            Row(
                "bi-lstm",
                "lstm",
                printed("speech", "Bi-LSTM", "per", "epoch_s"),
                model={"dim": 320, "depth": 3},
                training=FULL,
            ),
            Row("softmax", "softmax", printed("speech", "Softmax", "per", "epoch_s"), training=GRAPH),
            Row("reformer-4", ("reformer", REFORMER_4), printed("speech", "LSH-4", "per", "epoch_s")),
            Row("linear", "linear", printed("speech", "Linear", "per", "epoch_s"), training=GRAPH),
            Row("softmax-taps", "softmax", model=NEAR, training=GRAPH),
            Row("linear-taps", "linear", model=NEAR, training=GRAPH),
        ),
        differs=(
            "AN4, 948 utterances of three seconds including validation, not 80 hours of the Wall Street Journal; 13 "
            "mel cepstra, not 40 filters; utterances are stretched and masked",
            "every row reads frames of 40 ms (four joined), after two convolutions over three of them",
            "softmax-taps, linear-taps: the same size, but rotary positions, and a convolution over seven frames to "
            "each side before each attention (taps): with so little data, attention does not learn by itself which "
            "frames are near",
            "pre-norm; AdamW at 1e-3 with warm-up and cosine decay; theirs is 1e-4, halved when progress stops",
            "seconds an epoch are of rows that may share a GPU (rows_side_by_side); on one, softmax and linear are "
            "captured as CUDA graphs, reformer-4 and the LSTM are not",
        ),
    ),
)
TABLES = {table.name: table for table in _TABLES}
