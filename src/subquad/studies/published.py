"""Every published figure that ours are compared with: the tables of the papers, as data.

A column says which of our figures to compare it with: quality on the same task in the same metric, or time or memory as
a ratio to softmax in the same run, because absolute values depend on the machine. `report/published.py` looks it up.
`printed` gives a row's figures to the tables that `subquad reproduce` runs.
"""

from typing import NamedTuple


class Quality(NamedTuple):
    """A metric on a task, both written with lower-case letters and digits only."""

    task: str
    metric: str


class Speed(NamedTuple):
    """Training steps a second at this length, relative to softmax; with `arena`, those of the arena's models count."""

    length: int
    arena: bool = True


class Memory(NamedTuple):
    """Peak memory at this length, relative to softmax."""

    length: int


class Column(NamedTuple):
    title: str
    ours: Quality | Speed | Memory | None = None


class Published(NamedTuple):
    name: str
    title: str
    source: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, str | None, tuple[float | str | None, ...]], ...]  # label, our mechanism, figures
    note: str = ""


LINEAR = "Katharopoulos et al. 2020, Transformers are RNNs, arXiv:2006.16236"
SPARSE = "Child et al. 2019, Generating Long Sequences with Sparse Transformers, arXiv:1904.10509"
ARENA = "Tay et al. 2021, Long Range Arena, arXiv:2011.04006"
ARENA_TASKS = ("ListOps", "Text", "Retrieval", "Image", "Pathfinder")
K = (1024, 2048, 3072, 4096)

# fmt: off
_TABLES = (
    Published(
        "mnist", "MNIST, pixel by pixel", LINEAR,
        (Column("bits/dim", Quality("mnist", "bitsdim")), Column("images/s", Quality("mnist", "imagess"))),
        (("Softmax", "softmax", (0.621, 0.45)), ("Softmax, keys and values cached", "softmax", (0.621, 7.56)),
         ("LSH-1", None, (0.745, 0.68)), ("LSH-4", "reformer", (0.676, 0.27)), ("Linear", "linear", (0.644, 142.8))),
        "317 times softmax that computes the prefix anew for each pixel; 18.9 times softmax with cached keys.",
    ),
    Published(
        "cifar10", "CIFAR-10, byte by byte, 3,072 a picture", LINEAR,
        (Column("bits/dim", Quality("cifar10", "bitsdim")), Column("images/s", Quality("cifar10", "imagess"))),
        (("Softmax", "softmax", (3.47, 0.004)), ("Softmax, keys and values cached", "softmax", (3.47, 0.32)),
         ("LSH-1", None, (3.39, 0.015)), ("LSH-4", "reformer", (3.51, 0.005)), ("Linear", "linear", (3.40, 17.85))),
        "Trained for a fixed time, one GPU week, so a faster mechanism saw more pictures.",
    ),
    Published(
        "speech", "Speech recognition, Wall Street Journal", LINEAR,
        (Column("phoneme error rate, %", Quality("speech", "per")), Column("seconds an epoch")),
        (("Bi-LSTM", None, (10.94, 1047)), ("Softmax", "softmax", (5.12, 2711)), ("LSH-4", "reformer", (9.33, 2250)),
         ("Linear", "linear", (8.08, 824))),
        "Softmax is clearly better than linear here, and sequences are short: 800 frames on average.",
    ),
    Published(
        "sparse-speed", "Sparse Transformer: quality and time for an iteration", SPARSE,
        (Column("enwik8, bits/byte", Quality("enwik8", "bitsbyte")), Column("time"),
         Column("speed over dense", Speed(12288, arena=False)),
         Column("CIFAR-10, bits/byte", Quality("cifar10", "bitsbyte")),
         Column("time"), Column("speed over dense", Speed(3072, arena=False))),
        (("Dense attention", "softmax", (1.00, 1.31, 1.0, 2.82, 0.54, 1.0)),
         ("Fixed", "fixed", (0.99, 0.55, 2.38, 2.85, 0.47, 1.15)),
         ("Strided", "strided", (1.13, 0.35, 3.74, 2.80, 0.38, 1.42))),
        "Contexts of 12,288 and 3,072. Dense attention of 2019 wrote the whole matrix; today's flash softmax does not.",
    ),
    Published(
        "sparse", "Sparse Transformer: density modelling", SPARSE,
        (Column("data"), Column("bits/byte")),
        (("PixelCNN", None, ("CIFAR-10", 3.03)), ("PixelCNN++", None, ("CIFAR-10", 2.92)),
         ("Image Transformer", None, ("CIFAR-10", 2.90)), ("PixelSNAIL", None, ("CIFAR-10", 2.85)),
         ("Sparse Transformer 59M (strided)", "strided", ("CIFAR-10", 2.80)),
         ("Deeper Self-Attention", None, ("enwik8", 1.06)), ("Transformer-XL 88M", "transformer_xl", ("enwik8", 1.03)),
         ("Transformer-XL 277M", "transformer_xl", ("enwik8", 0.99)),
         ("Sparse Transformer 95M (fixed)", "fixed", ("enwik8", 0.99)),
         ("PixelCNN", None, ("ImageNet 64x64", 3.57)), ("Parallel Multiscale", None, ("ImageNet 64x64", 3.7)),
         ("Glow", None, ("ImageNet 64x64", 3.81)), ("SPN 150M", None, ("ImageNet 64x64", 3.52)),
         ("Sparse Transformer 152M (strided)", "strided", ("ImageNet 64x64", 3.44)),
         ("Sparse Transformer 152M (strided)", "strided", ("Classical music, 5 s at 12 kHz", 1.97))),
    ),
    Published(
        "sparse-context", "Sparse Transformer (fixed) on enwik8: the longer the context, the better", SPARSE,
        (Column("bits/byte"),),
        (("6,144 tokens", None, (0.9952,)), ("9,216 tokens", None, (0.9936,)), ("10,752 tokens", None, (0.9932,)),
         ("11,904 tokens", None, (0.9930,)), ("12,096 tokens", None, (0.9922,)), ("12,160 tokens", None, (0.9908,))),
        "Least context while evaluating.",
    ),
    Published(
        "lra", "Long Range Arena: accuracy, %", ARENA,
        (*(Column(task, Quality(task.lower(), "accuracy")) for task in ARENA_TASKS), Column("Average")),
        (("Transformer", "softmax", (36.37, 64.27, 57.46, 42.44, 71.40, 54.39)),
         ("Local Attention", "local", (15.82, 52.98, 53.39, 41.46, 66.63, 46.06)),
         ("Sparse Trans.", "fixed", (17.07, 63.58, 59.59, 44.24, 71.71, 51.24)),
         ("Longformer", "longformer", (35.63, 62.85, 56.89, 42.22, 69.71, 53.46)),
         ("Linformer", "linformer", (35.70, 53.94, 52.27, 38.56, 76.34, 51.36)),
         ("Reformer", "reformer", (37.27, 56.10, 53.40, 38.07, 68.50, 50.67)),
         ("Sinkhorn Trans.", "sinkhorn", (33.67, 61.20, 53.83, 41.23, 67.45, 51.39)),
         ("Synthesizer", "synthesizer", (36.99, 61.68, 54.67, 41.61, 69.45, 52.88)),
         ("BigBird", "bigbird", (36.05, 64.02, 59.29, 40.83, 74.87, 55.01)),
         ("Linear Trans.", "linear", (16.13, 65.90, 53.09, 42.34, 75.30, 50.55)),
         ("Performer", "performer", (18.01, 65.40, 53.82, 42.77, 77.05, 51.41))),
        "All fail on Path-X. Always giving the most frequent answer of ListOps scores 17 %, so 15 to 18 % is chance.",
    ),
    Published(
        "lra-speed", "Long Range Arena: training steps a second, over those of the Transformer", ARENA,
        tuple(Column(f"T = {n // 1024}K", Speed(n)) for n in K),
        (("Transformer (8.1, 4.9, 2.3, 1.4 steps/s)", "softmax", (1.0, 1.0, 1.0, 1.0)),
         ("Local Attention", "local", (1.1, 1.7, 3.2, 5.3)), ("Linformer", "linformer", (1.2, 1.9, 3.7, 5.5)),
         ("Reformer", "reformer", (0.5, 0.4, 0.7, 0.8)), ("Sinkhorn Trans.", "sinkhorn", (1.1, 1.6, 2.9, 3.8)),
         ("Synthesizer", "synthesizer", (1.1, 1.2, 2.9, 1.4)), ("BigBird", "bigbird", (0.9, 0.8, 1.2, 1.1)),
         ("Linear Trans.", "linear", (1.1, 1.9, 3.7, 5.6)), ("Performer", "performer", (1.2, 1.9, 3.8, 5.7))),
        "Theirs: whole models on 16 TPU v3 chips, against dense softmax. Ours, on the run's machine: subquad lra "
        "--efficiency compares whole models with softmax that builds the T x T matrix, so our softmax, a flash kernel, "
        "is above 1; subquad compare compares one layer with flash softmax.",
    ),
    Published(
        "lra-memory", "Long Range Arena: peak memory, over that of the Transformer", ARENA,
        tuple(Column(f"T = {n // 1024}K", Memory(n)) for n in K),
        tuple((label, mechanism, tuple(round(v / b, 2) for v, b in zip(values, (0.85, 2.65, 5.51, 9.48), strict=True)))
              for label, mechanism, values in (
            ("Transformer (0.85, 2.65, 5.51, 9.48 GB)", "softmax", (0.85, 2.65, 5.51, 9.48)),
            ("Local Attention", "local", (0.42, 0.76, 1.06, 1.37)),
            ("Linformer", "linformer", (0.37, 0.55, 0.99, 0.99)),
            ("Reformer", "reformer", (0.48, 0.99, 1.53, 2.28)),
            ("Sinkhorn Trans.", "sinkhorn", (0.47, 0.83, 1.13, 1.48)),
            ("Synthesizer", "synthesizer", (0.65, 1.98, 4.09, 6.99)),
            ("BigBird", "bigbird", (0.77, 1.49, 2.18, 2.88)),
            ("Linear Trans.", "linear", (0.37, 0.57, 0.80, 1.03)),
            ("Performer", "performer", (0.37, 0.59, 0.82, 1.06)))),
        "Their softmax stores the T x T matrix for the backward pass. Ours is a flash kernel, whose memory grows as T.",
    ),
)
# fmt: on
TABLES = {table.name: table for table in _TABLES}


def printed(table: str, label: str, *measures: str, first: int = 0, data: str | None = None) -> dict[str, float]:
    """The published figures of a row, keyed by the names of our measures, from column `first` on.

    If several rows have the same label, `data` selects the one with this first column.
    """
    (figures,) = (figures for name, _, figures in TABLES[table].rows if name == label and data in (None, figures[0]))
    return dict(zip(measures, figures[first:], strict=False))  # type: ignore[arg-type]
