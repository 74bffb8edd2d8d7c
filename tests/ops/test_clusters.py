import pytest
import torch
from torch import Tensor

from subquad.ops.clusters import cluster_means, hamming_clusters, kmeans_step, nearest_bits, sign_bits


def lloyd(bits: Tensor, clusters: int, iterations: int) -> tuple[list[list[int]], list[int]]:
    """The algorithm with integers and loops."""
    rows = [[int(b) for b in row] for row in bits]
    centroids = [rows[c * len(rows) // clusters] for c in range(clusters)]

    def nearest(row: list[int]) -> int:
        differ = [sum(a != b for a, b in zip(row, c, strict=True)) for c in centroids]
        return differ.index(min(differ))

    for _ in range(iterations):
        label = [nearest(row) for row in rows]
        for c in range(clusters):
            votes = [
                sum(column) for column in zip(*[r for r, own in zip(rows, label, strict=True) if own == c], strict=True)
            ]
            if votes:
                centroids[c] = [
                    old if v == 0 else (1 if v > 0 else -1) for v, old in zip(votes, centroids[c], strict=True)
                ]
    return centroids, [nearest(row) for row in rows]


def test_hamming_clusters_are_lloyds() -> None:
    bits = sign_bits(torch.randn(3, 29, 4, generator=torch.Generator().manual_seed(0)), torch.randn(9, 5))
    lengths = torch.tensor([29, 11, 3])
    codes, label = hamming_clusters(bits, 5, 4, lengths)
    for row, n in enumerate(lengths.tolist()):
        want_codes, want = lloyd(bits[row, :n], 5, 4)
        assert codes[row].tolist() == want_codes
        assert label[row, :n].tolist() == want
    assert all(torch.equal(a[0], b) for a, b in zip((codes, label), hamming_clusters(bits[0], 5, 4), strict=True))


def test_as_many_clusters_as_different_tokens_keeps_all_apart() -> None:
    bits = 2.0 * torch.tensor([[i >> b & 1 for b in range(5)] for i in range(17)]) - 1
    assert hamming_clusters(bits, 17, 6)[1].tolist() == list(range(17))


def test_empty_centroids_are_not_joined() -> None:
    codes = torch.tensor([[1.0, 1, 1], [1, 1, -1], [-1, -1, -1]])
    assert nearest_bits(torch.tensor([[1.0, 1, 1]]), codes).item() == 0
    assert nearest_bits(torch.tensor([[1.0, 1, 1]]), codes, torch.tensor([False, True, True])).item() == 1


def test_bits_differ_more_the_farther_apart_points_are_on_one_ray() -> None:
    x = torch.randn(16, generator=torch.Generator().manual_seed(0))
    planes = torch.randn(4000, 17, generator=torch.Generator().manual_seed(1))
    bits = sign_bits(torch.stack((x, 1.5 * x, 3 * x, 9 * x)), planes)
    near, far, farther = ((bits[0] != b).sum().item() for b in bits[1:])
    assert 0 < near < far < farther, "planes through the origin would not tell them apart"


def test_cluster_means_and_a_step_of_kmeans() -> None:
    x = torch.tensor([[[1.0, 0], [3, 0], [0, 5], [9, 9]]])
    label = torch.tensor([[0, 0, 2, -1]])
    means, count = cluster_means(x, label, 3)
    assert means.tolist() == [[[2, 0], [0, 0], [0, 5]]]
    assert count.tolist() == [[2, 0, 1]]
    moved = kmeans_step(torch.ones(1, 3, 2), x, label, decay=0.75)
    torch.testing.assert_close(moved, torch.tensor([[[1.25, 0.75], [1, 1], [0.75, 2]]]))


def test_means_of_many_tokens_in_16_bits_are_exact() -> None:
    """A sum in bfloat16 stops growing at 256 tokens."""
    x = torch.rand(1, 2000, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    moved = kmeans_step(torch.zeros(1, 1, 3), x, torch.zeros(1, 2000, dtype=torch.int64), decay=0.0)
    torch.testing.assert_close(moved, x.float().mean(1, keepdim=True))


def test_all_ranks_move_to_the_mean_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    x, label = torch.randn(2, 9, 3), torch.randint(0, 3, (2, 9))
    centroids = torch.randn(2, 4, 3)
    want = kmeans_step(centroids, x, label, decay=0.5)

    def add_the_other_rank(stats: Tensor) -> None:
        means, count = cluster_means(x[:, 4:], label[:, 4:], 4)
        stats += torch.cat((means * count[..., None], count[..., None]), dim=-1)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", add_the_other_rank)
    torch.testing.assert_close(kmeans_step(centroids, x[:, :4], label[:, :4], decay=0.5), want)
