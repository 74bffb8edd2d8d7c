import pytest
import torch

from subquad.ops.prefix import join_softmax, join_top, prefix


@pytest.mark.parametrize("blocks", range(1, 10))
def test_prefixes_are_those_of_the_blocks_laid_end_to_end(blocks: int) -> None:
    torch.manual_seed(blocks)
    scores, values = torch.randn(2, blocks, 4, dtype=torch.float64), torch.randn(blocks, 4, 3, dtype=torch.float64)
    parts = torch.einsum("gnc,ncv->gnv", scores.softmax(-1), values)
    mass, o = prefix((scores.logsumexp(-1, keepdim=True), parts), join_softmax)
    found, key = scores.topk(3, dim=-1)
    best, keys = prefix((found, key + 4 * torch.arange(blocks)[:, None]), join_top)
    for n in range(blocks):
        flat = scores[:, : n + 1].flatten(1)
        torch.testing.assert_close(mass[:, n, 0], flat.logsumexp(-1))
        torch.testing.assert_close(o[:, n], flat.softmax(-1) @ values[: n + 1].flatten(0, 1))
        torch.testing.assert_close(best[:, n], flat.topk(3).values)
        assert torch.equal(keys[:, n], flat.topk(3).indices)
