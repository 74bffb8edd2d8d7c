import math
from typing import Any

import pytest
import torch

from subquad import build
from subquad.mechanisms.bigbird import Bigbird
from subquad.ops.sparse.patterns import Random
from tests.mechanisms.test_local import DIM, HEADS, full, tokens

BLOCK, T = 4, 50  # 13 blocks, the last of 2 tokens


def bigbird(**options: Any) -> Bigbird:
    torch.manual_seed(0)
    mix = build("bigbird", **{"dim": DIM, "heads": HEADS, "block": BLOCK, **options}).double()
    assert isinstance(mix, Bigbird)
    return mix


@pytest.mark.parametrize("causal", [False, True])
def test_every_block_covered_is_full_attention(causal: bool) -> None:
    mix, x = bigbird(random=20, causal=causal), tokens(2, T, DIM)
    torch.testing.assert_close(mix(x), full(mix)(x), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(bigbird(random=1, causal=causal)(x), full(mix)(x))


@pytest.mark.parametrize("n", [T, 31, 9, 3])
def test_rows_read_window_global_and_random_blocks(n: int) -> None:
    """Rows of length n inside T, not causal: exact sets, with `random` more blocks that are none of the others."""
    mix, r = bigbird(random=2), 2
    every = torch.arange(n)
    allowed = mix._allowed(torch.arange(T)[:, None], torch.arange(T)[None], n)
    assert torch.equal((mix.pattern(tokens(1, n, DIM)) > 0)[0], allowed[:, :n, :n])
    is_global = (every < BLOCK) | (every >= n - BLOCK)
    for head in range(HEADS):
        for i in range(n):
            read = allowed[head, i, :n]
            if is_global[i]:
                assert read.all()
                continue
            known = is_global | ((every // BLOCK - i // BLOCK).abs() <= 1)
            assert read[known].all()
            blocks = {b: int(((every // BLOCK == b) & ~known).sum()) for b in range(-(-n // BLOCK))}
            drawn = {int(j) // BLOCK for j in (read & ~known).nonzero()[:, 0]}
            assert len(drawn) == min(r, sum(size > 0 for size in blocks.values()))
            assert int((read & ~known).sum()) == sum(blocks[b] for b in drawn), "a block is read whole"
            assert torch.equal(read, allowed[head, i // BLOCK * BLOCK, :n] | is_global), "one draw for a block"


def test_causal_rows_read_the_past_and_are_not_dense() -> None:
    mix = bigbird(random=2, causal=True)
    read = mix.pattern(tokens(1, T, DIM))[0] > 0
    at = torch.arange(T)
    for head in range(HEADS):
        for i in range(T):
            row = i // BLOCK
            known = (at <= i) & ((at < BLOCK) | (at // BLOCK >= row - 1))
            assert read[head, i][known].all()
            extra = (read[head, i] & ~known).nonzero()[:, 0] // BLOCK
            assert len(set(extra.tolist())) == min(2, max(0, row - 2))
            assert len(extra) == BLOCK * len(set(extra.tolist()))
    assert int(read[0, -1].sum()) < T, "never dense in silence"


def test_heads_layers_and_seeds_draw_differently_and_redraw_is_kept() -> None:
    x = tokens(1, T, DIM)
    reads = [bigbird(**options).pattern(x) > 0 for options in ({}, {"layer": 1}, {"seed": 1})]
    assert not torch.equal(reads[0], reads[1])
    assert not torch.equal(reads[0], reads[2])
    assert not torch.equal(reads[0][0, 0], reads[0][0, 1])
    mix, other = bigbird(), bigbird(seed=9)
    mix.redraw(torch.Generator().manual_seed(4))
    assert not torch.equal(mix.pattern(x) > 0, reads[0])
    other.load_state_dict(mix.state_dict())
    assert torch.equal(other.pattern(x) > 0, mix.pattern(x) > 0)
    assert torch.equal(other(x), mix(x))
    mix.redraw()
    assert torch.equal(mix.pattern(x) > 0, reads[0])


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
def test_etc_equals_a_loop_over_the_definition(causal: bool) -> None:
    """Without random blocks: learned tokens read [g, x] and become g', then x reads g' and its window."""
    mix, n, width = bigbird(construction="etc", random=0, causal=causal), 15, DIM // HEADS
    x = tokens(1, n, DIM)

    def attend(queries: torch.Tensor, keys: torch.Tensor, sets: list[list[int]]) -> torch.Tensor:
        q, (_, k, v) = mix.heads.split(queries)[0], mix.heads.split(keys)
        out = torch.zeros_like(q)
        for h in range(HEADS):
            for t, read in enumerate(sets):
                weights = [math.exp(float(q[0, t, h] @ k[0, s, h]) / math.sqrt(width)) for s in read]
                for w, s in zip(weights, read, strict=True):
                    out[0, t, h] += w / sum(weights) * v[0, s, h]
        return mix.heads.merge(out)

    tokens_read = mix.tokens[None]
    if not causal:
        everything = [list(range(BLOCK + n))] * BLOCK
        tokens_read = tokens_read + attend(tokens_read, torch.cat((tokens_read, x), 1), everything)
    window = [[s for s in range(n) if abs(s // BLOCK - t // BLOCK) <= 1 and not (causal and s > t)] for t in range(n)]
    sets = [[*range(BLOCK), *(BLOCK + s for s in read)] for read in window]
    want = attend(x, torch.cat((tokens_read, x), 1), sets)
    torch.testing.assert_close(mix(x), want, rtol=1e-12, atol=1e-12)


def test_learned_tokens_carry_news_from_everywhere() -> None:
    mix = bigbird(construction="etc", random=0)
    x = tokens(1, T, DIM).requires_grad_()
    (grad,) = torch.autograd.grad(mix(x)[0, 25].sum(), x)
    assert (grad[0].abs().sum(-1) > 0).all()
    mix(x).sum().backward()
    assert mix.tokens.grad is not None
    assert (mix.tokens.grad != 0).any()


@pytest.mark.parametrize("construction", ["itc", "etc"])
def test_decoding_far_beyond_the_window(construction: str) -> None:
    mix = bigbird(construction=construction, causal=True)
    assert mix.traits.state == "growing"
    x = tokens(2, T, DIM)
    want = mix(x)
    state = mix.init_state(2, capacity=T)
    size = state.k.shape[1]
    assert size == T + (BLOCK if construction == "etc" else 0)
    for t in range(T):
        assert state.position.tolist() == [t, t]
        y, state = mix.step(x[:, t], state)
        torch.testing.assert_close(y, want[:, t], rtol=1e-10, atol=1e-10)
    assert state.k.shape[1] == size


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_equals_the_transformers_library() -> None:
    """With our random blocks in place of its own, on a length that its blocks divide."""
    pytest.importorskip("transformers")
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    size, mix = 20 * BLOCK, bigbird(random=2)
    config = BigBirdConfig(
        hidden_size=DIM, num_attention_heads=HEADS, block_size=BLOCK, num_random_blocks=2, use_bias=True
    )
    theirs = BigBirdBlockSparseAttention(config, seed=0).double()
    for at, part in enumerate((theirs.query, theirs.key, theirs.value)):
        rows = slice(at * DIM, (at + 1) * DIM)
        part.load_state_dict({name: p[rows] for name, p in mix.heads.qkv.state_dict().items()})
    torch.nn.init.eye_(mix.heads.out.weight)
    torch.nn.init.zeros_(mix.heads.out.bias)
    middle = torch.arange(2, size // BLOCK)  # blocks 1 to the last but one, counted from the last block
    drawn = [a.table(middle, length=size) - 1 for p in mix.patterns for a in p.atoms if isinstance(a, Random)]
    theirs._bigbird_block_rand_mask_with_head = lambda *_, **__: [table.numpy() for table in drawn]
    blocked, band, rows_mask, columns_mask = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(2, size), BLOCK)
    x = tokens(2, size, DIM)
    want = theirs.train()(
        x,
        band_mask=band.double(),
        from_mask=rows_mask.double(),
        to_mask=columns_mask.double(),
        from_blocked_mask=blocked.double(),
        to_blocked_mask=blocked.double(),
    )[0]
    torch.testing.assert_close(mix(x), want, rtol=1e-10, atol=1e-10)


def test_options() -> None:
    for options, match in (
        ({"block": 0}, "block=0"),
        ({"random": -1}, "random=-1"),
        ({"construction": "abc"}, "construction='abc'"),
    ):
        with pytest.raises(ValueError, match=match):
            bigbird(**options)
