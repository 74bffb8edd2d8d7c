import dataclasses
import errno
import itertools
import math
import os
import random
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import subquad
from subquad import LanguageModel
from subquad.disk import write_whole
from subquad.models import LSTM
from subquad.models import state as states
from subquad.models.decoding import decoder_of
from subquad.models.footprint import bytes_per_stream
from subquad.models.state import State, leaves, size
from subquad.serve.borders import border_after, is_border
from subquad.serve.cache import PrefixCache, fingerprint
from subquad.serve.engine import Engine
from tests.serve import test_engine as engines

CAUSAL = [name for name, cls in subquad.MECHANISMS.items() if cls.traits.causal]
EVERY = 4
EARLY = (1, 3)
TOKEN = 4  # bytes of a token in the tree


class Sum(NamedTuple):
    """A made-up state of constant size, and one that grows: every value tells which tokens it comes from."""

    s: Tensor  # [1, 5]
    position: Tensor  # [1]


class Grown(NamedTuple):
    s: Tensor  # [1, 5]
    k: Tensor  # [1, WINDOW + n, 2], the last WINDOW tokens, and then all of them
    v: Tensor  # [1, n/3, 2], three tokens together; the last row is still being added to
    position: Tensor  # [1]


WINDOW = 3


def digest(tokens: tuple[int, ...], *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(hash(tokens) & 0xFFFFFFFF))


def constant(tokens: tuple[int, ...]) -> Sum:
    return Sum(digest(tokens, 1, 5), torch.tensor([len(tokens)]))


def growing(tokens: tuple[int, ...], spare: int = 0) -> Grown:
    count = len(tokens)
    window = [digest((*tokens[max(0, count - WINDOW) :], n), 1, 1, 2) for n in range(WINDOW)]
    k = [digest(tokens[: n + 1], 1, 1, 2) for n in range(count)]
    v = [digest((-1, *tokens[3 * n : 3 * n + 3]), 1, 1, 2) for n in range(math.ceil(count / 3))]
    more = torch.full((1, spare, 2), math.nan)  # room for later tokens
    return Grown(
        digest(tokens, 1, 5), torch.cat([*window, *k, more], 1), torch.cat([*v, more], 1), torch.tensor([count])
    )


def room(count: int) -> Grown:
    k, v = torch.zeros(1, WINDOW + count, 2), torch.zeros(1, math.ceil(count / 3), 2)
    return Grown(torch.zeros(1, 5), k, v, torch.zeros(1, dtype=torch.int64))


def same(one: State | None, two: State | None) -> bool:
    """Whether two states are equal bit by bit."""
    if one is None or two is None:
        return one is two
    pairs = list(zip(leaves(one), leaves(two), strict=True))
    return all(n == m and a.dtype == b.dtype and torch.equal(a, b) for (n, a), (m, b) in pairs)


def small(limit: int = 1 << 20, **how: Any) -> PrefixCache:
    return PrefixCache(limit, **{"every": EVERY, "early": EARLY, "like": constant((0,)), **how})


def draws(rng: random.Random) -> tuple[int, ...]:
    """Tokens that often share a prefix with earlier ones."""
    return tuple(rng.choice((1, 2)) if n % EVERY == 0 else 0 for n in range(rng.randrange(1, 9 * EVERY)))


def borders(longest: int) -> list[int]:
    return [n for n in range(1, longest + 1) if n % EVERY == 0 or n in EARLY]


class Oracle:
    """What the cache should hold: a plain dict from (owner, tokens) to what it continues, the least recent first."""

    def __init__(self, limit: int, grows: bool):
        self.limit, self.grows, self.held, self.evicted = limit, grows, dict[Any, Any](), 0

    def bytes(self) -> int:
        places = set()
        for owner, tokens in self.held:
            ways = [0, *borders(len(tokens) - 1), len(tokens)]
            places |= {(owner, tokens[:n], n - before) for before, n in itertools.pairwise(ways)}
        return TOKEN * sum(n for *_, n in places) + sum(self.size(*entry) for entry in self.held.items())

    def size(self, key: Any, base: Any) -> int:
        """Of a sum and a position, and of k and v where states grow; each takes a multiple of 64 bytes."""
        if not self.grows:
            return 64 + 64
        rows = WINDOW + len(key[1]), math.ceil(len(key[1]) / 3)
        if base is not None:
            n = len(base[1])
            # all rows of the base but those of one token, at the beginning and at the end
            rows = rows[0] - max(0, WINDOW + n - 2 * (WINDOW + 1)), rows[1] - max(0, math.ceil(n / 3) - 2)
        return 64 + 64 + sum(math.ceil(4 * 2 * n / 64) * 64 for n in rows)

    def touch(self, key: Any) -> None:
        while key is not None:
            self.held[key] = self.held.pop(key)
            key = self.held[key]

    def prefixes(self, owner: str, tokens: tuple[int, ...], longest: int) -> Iterator[Any]:
        for n in reversed(borders(longest)):
            if (owner, tokens[:n]) in self.held:
                yield owner, tokens[:n]

    def put(self, owner: str, tokens: tuple[int, ...]) -> None:
        key = owner, tokens
        if key not in self.held:
            shares = (base for base in self.prefixes(owner, tokens, len(tokens) - 1) if len(base[1]) > 5)
            base = next(shares, None) if self.grows else None
            if self.size(key, base) > self.limit:
                return
            self.held[key] = base
        self.touch(key)
        while self.bytes() > self.limit:
            del self.held[next(iter(self.held))]
            self.evicted += 1

    def find(self, owner: str, tokens: tuple[int, ...]) -> int:
        found: Any = (owner, tokens[:-1])
        if found not in self.held:
            found = next(self.prefixes(owner, tokens, len(tokens) - 1), None)
        if found is not None:
            self.touch(found)
        return 0 if found is None else len(found[1])


@pytest.mark.parametrize(("make", "how"), [(constant, {}), (growing, {"room": room, "like": room(1)})])
@pytest.mark.parametrize("limit", [1500, 6000, 1 << 20])
def test_it_does_what_a_dict_does(make: Any, how: Any, limit: int) -> None:
    rng, oracle, cache = random.Random(limit), Oracle(limit, bool(how)), small(limit, **how)
    found = hit_tokens = 0
    for _ in range(1500):
        owner, tokens = rng.choice(("", "a", "b")), draws(rng)
        if rng.random() < 0.5:
            if rng.random() < 0.5:
                tokens = tokens[: len(tokens) // EVERY * EVERY] or (1, 0, 0, 0)
            cache.put(tokens, make(tokens) if make is constant else growing(tokens, rng.randrange(3)), owner)
            oracle.put(owner, tokens)
        else:
            expected = oracle.find(owner, tokens)
            count, state = cache.find(tokens, owner)
            assert count == expected
            assert same(state, make(tokens[:count]) if count else None)
            found, hit_tokens = found + bool(count), hit_tokens + count
        got = cache.stats
        assert (got.entries, got.bytes, got.evicted) == (len(oracle.held), oracle.bytes(), oracle.evicted)
        assert got.bytes <= limit
    assert (got.hits, got.hit_tokens) == (found, hit_tokens)
    assert found > 50
    assert (got.evicted > 100) == (limit < 1 << 20)


def test_a_state_that_is_found_may_be_changed() -> None:
    cache, tokens = small(), (1, 2, 3, 4)
    given = constant(tokens)
    cache.put(tokens, given)
    given.s.zero_()
    for _ in range(2):
        _, state = cache.find((*tokens, 5))
        assert same(state, constant(tokens))
        state.s.zero_()


def test_counts_do_not_wait_for_the_disk() -> None:
    """Whoever reads a state holds the lock meanwhile."""
    cache = small()
    with ThreadPoolExecutor(1) as other, cache.lock:
        assert other.submit(lambda: cache.stats.entries).result(timeout=5) == 0


def test_one_token_is_left_to_read() -> None:
    cache, tokens = small(), (1, 2, 3, 4)
    cache.put(tokens, constant(tokens))
    assert cache.find(()) == cache.find((1,)) == cache.find(tokens) == (0, None)
    assert cache.find((*tokens, 5))[0] == 4


def test_a_state_between_borders_serves_prompts_that_are_read_to_the_same_place() -> None:
    cache = small()
    long = (1, 2, 3, 4, 5, 6)
    cache.put(long[:4], constant(long[:4]))
    cache.put(long, constant(long))
    assert cache.find((*long, 9))[0] == 6
    for other in (long, (*long, 7, 8), (*long[:5], 9, 9)):
        assert cache.find(other)[0] == 4  # otherwise the last piece would be cut elsewhere


def test_states_that_cannot_be_right_are_refused() -> None:
    cache = small()
    with pytest.raises(ValueError, match="tokens is empty"):
        cache.put((), constant(()))
    with pytest.raises(ValueError, match="has not seen exactly the 4 tokens"):
        cache.put((1, 2, 3, 4), constant((1, 2, 3)))
    with pytest.raises(ValueError, match="state has batch 2"):
        cache.put((1, 2, 3, 4), states.fork(constant((1, 2, 3, 4)), 2))
    assert cache.stats.bytes == 0
    for wrong in (
        {"limit": 0},
        {"every": 0},
        {"early": (0,)},
        {"folder_limit": 5},
        {"device": "cube"},
        {"folder": Path("x")},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong)).replace("folder", "folder|fingerprint")):
            small(**wrong)


def test_a_state_larger_than_the_cache_makes_none_leave() -> None:
    cache = small(1000, room=room, like=room(1))
    cache.put((1, 2, 3, 4), growing((1, 2, 3, 4)))
    long = (9,) * 400
    cache.put(long, growing(long))
    assert cache.stats.entries == 1
    assert cache.find((*long, 1)) == (0, None)
    assert cache.find((1, 2, 3, 4, 5))[0] == 4


# With models


def make(mechanism: Any, **changes: Any) -> Any:
    torch.manual_seed(0)
    fields = {"vocab": 23, "dim": 16, "depth": 2, "heads": 4, "mechanism": mechanism, "max_length": 64, **changes}
    model = LanguageModel(**fields)
    for p in model.parameters():
        p.data.mul_(1.5)
    return model.eval()


def roomy(model: Any, count: int) -> State:
    """A state with room for so many tokens."""
    with torch.no_grad():
        return decoder_of(model).init_state(1, count)


def enlarge(state: State, wanted: State) -> State:
    """The state with the room of another, empty at the end."""
    return states.map_state(
        lambda x, y: x if x.shape == y.shape else torch.cat([x, torch.zeros_like(y[:, x.shape[1] :])], 1), state, wanted
    )


@torch.no_grad()
def read(
    model: Any, tokens: tuple[int, ...], every: int, cache: PrefixCache | None = None,
    early: tuple[int, ...] | None = None,
) -> tuple[Tensor, State]:  # fmt: skip
    """The logits after a prompt, and the state after it; with `early` the last token is read alone, as a step does."""
    decoder, logits, wanted = decoder_of(model), torch.empty(0), roomy(model, max(64, len(tokens)))
    at, state = (0, None) if cache is None else cache.find(tokens)
    last = len(tokens) - (early is not None)
    while at < len(tokens):
        end = min(border_after(at, every, early or ()), last if at < last else len(tokens))
        before = None if state is None else enlarge(state, wanted)
        logits, state = decoder.prefill(torch.tensor([tokens[at:end]]), state=before)
        at = end
        if cache is not None and (at == last < len(tokens) or is_border(at, every, early or ())):
            cache.put(tokens[:at], state)
    return logits[0, -1], state


MODELS = [
    (name, {key: value for key, value in options.items() if key not in ("parts", "layer")})
    for name in CAUSAL
    for options in subquad.MECHANISMS[name].small
    if options.get("strict_causal", True) and options.get("sortcut") is None
]


@pytest.mark.parametrize("mechanism", [*MODELS, "linear, softmax", "gated_deltanet, local", "lstm", "taps"], ids=str)
def test_an_answer_with_the_cache_is_the_one_without(mechanism: Any, tmp_path: Path) -> None:
    if mechanism == "lstm":
        model: Any = LSTM(vocab=23, dim=8, depth=2).eval()
    else:
        depth = 1 if isinstance(mechanism, tuple) else 2
        model = make("linear", taps=(1, 2)) if mechanism == "taps" else make(mechanism, depth=depth)
    decoder, rng, every, early = decoder_of(model), random.Random(0), 5, (2,)
    base = tuple(rng.randrange(23) for _ in range(40))
    cache = PrefixCache.of(model, 1 << 22, every=every, early=early, folder=tmp_path / "c")
    again = None
    for turn in range(5):
        if turn == 3:  # states from the disk
            cache.close()
            again = cache = PrefixCache.of(model, 1 << 22, every=every, early=early, folder=tmp_path / "c")
        kept = rng.randrange(41)
        tokens = base[:kept] + tuple(rng.randrange(23) for _ in range(rng.randrange(1, 48 - kept)))
        expected, state = read(model, tokens, every, early=early)
        for _ in range(2 if turn == 0 else 1):  # the second time, all but the last token is known
            logits, own = read(model, tokens, every, cache, early)
            assert torch.equal(logits, expected)
        assert cache.find(tokens)[0] == len(tokens) - 1
        step = torch.tensor([tokens[0]])
        with torch.no_grad():
            one, two = (decoder.step(step, enlarge(given, roomy(model, 64)))[0] for given in (state, own))
        assert torch.equal(one, two)
    assert again is not None
    assert again.stats.hits > 0
    assert again.stats.loaded > 0
    assert again.stats.damaged == 0
    cache.close()


def cut(state: State, count: int) -> State:
    return states.map_state(lambda tensor: tensor[:, :count] if tensor.ndim > 1 else tensor, state)


def test_a_growing_state_costs_memory_once() -> None:
    """Each border of a long prompt adds its own rows; whole states at n borders would take n/2 times as much."""
    model, tokens = make("softmax", max_length=None), tuple(n % 23 for n in range(513))
    cache = PrefixCache.of(model, 1 << 30, every=8, early=())
    read(model, tokens, 8, cache)
    count, state = cache.find(tokens)
    assert count == 512
    assert same(state, cut(read(model, tokens[:512], 8)[1], 512))
    assert cache.stats.entries == 64
    assert cache.stats.bytes < 1.5 * size(state)


def test_states_at_sparse_borders_are_shared_too() -> None:
    model, tokens = make("softmax", max_length=None), tuple(n % 23 for n in range(400))
    cache = PrefixCache.of(model, 1 << 30, every=8)
    for count in (320, 8, 160, 400):  # the last one continues the longest
        _, state = read(model, tokens[:count], 8)
        cache.put(tokens[:count], state)
    for count in (8, 160, 320, 400):
        found, state = cache.find((*tokens[:count], 1))
        assert found == count
        assert same(state, cut(read(model, tokens[:count], 8)[1], count))


# Owners


def test_owners_never_meet(tmp_path: Path) -> None:
    cache, tokens = small(folder=tmp_path / "c", fingerprint="m"), (1, 2, 3, 4)
    cache.put(tokens, constant(tokens), "key-of-anna")
    cache.flush()
    for other in ("", "key-of-ben", "key-of-ann", "KEY-OF-ANNA"):
        assert cache.find((*tokens, 5), other) == (0, None)
    assert cache.find((*tokens, 5), "key-of-anna")[0] == 4
    cache.close()
    kept = list((tmp_path / "c").rglob("*"))
    assert not any("anna" in str(path) for path in kept)
    assert not any(path.is_file() and b"anna" in path.read_bytes() for path in kept)
    again = small(folder=tmp_path / "c", fingerprint="m")
    assert again.find((*tokens, 5), "key-of-ben") == (0, None)
    assert again.find((*tokens, 5), "key-of-anna")[0] == 4
    again.close()


def test_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        cache = small(folder=tmp_path / "c", fingerprint="m")
        cache.put((1, 2, 3, 4), constant((1, 2, 3, 4)), "anna")
        cache.close()
    finally:
        os.umask(old)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "c", *(tmp_path / "c").rglob("*")]}
    assert sum(path.suffix == ".safetensors" for path in modes) == 1
    for path, mode in modes.items():
        assert mode == 0o700 if path.is_dir() else mode & 0o077 == 0 or path.name == ".lock", path


# Files and faults


def filled(folder: Path, count: int = 6, **how: Any) -> list[tuple[int, ...]]:
    """A folder of states, and the tokens of each."""
    cache = small(folder=folder, fingerprint="m", **how)
    known: list[tuple[int, ...]] = [(n, 0, 0, 0) for n in range(count)]
    for tokens in known:
        cache.put(tokens, growing(tokens) if how else constant(tokens))
    cache.close()
    return known


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in ("key", ".lock"))


def test_states_outlive_the_server(tmp_path: Path) -> None:
    known = filled(tmp_path / "c")
    again = small(folder=tmp_path / "c", fingerprint="m")
    assert again.stats.files == 6
    assert again.stats.entries == 0
    for tokens in known:
        count, state = again.find((*tokens, 5))
        assert count == 4
        assert same(state, constant(tokens))
    assert again.stats.loaded == again.stats.entries == 6
    again.close()


@pytest.mark.parametrize("other", [{"fingerprint": "n"}, {"every": 2}, {"early": (2,)}])
def test_states_of_another_model_stay_and_never_serve(other: Any, tmp_path: Path) -> None:
    known, before = filled(tmp_path / "c"), files(tmp_path / "c")
    again = small(**{"folder": tmp_path / "c", "fingerprint": "m", **other})
    assert all(again.find((*tokens, 5)) == (0, None) for tokens in known)
    assert again.stats.files == 6
    again.put((9, 9, 9, 9), constant((9, 9, 9, 9)))
    again.close()
    assert set(before) < set(files(tmp_path / "c"))
    first = small(folder=tmp_path / "c", fingerprint="m")
    assert all(first.find((*tokens, 5))[0] == 4 for tokens in known)
    assert first.find((9, 9, 9, 9, 5)) == (0, None)
    first.close()


def test_models_share_the_room_on_disk(tmp_path: Path) -> None:
    """The least recently used file of all leaves first."""
    known, before = filled(tmp_path / "c"), files(tmp_path / "c")
    each = before[0].stat().st_size
    for path in before:  # long ago: the system's clock for files may not tell moments apart
        os.utime(path, (1e9, 1e9))
    first = small(folder=tmp_path / "c", fingerprint="m")
    assert first.find((*known[2], 5))[0] == 4  # used last
    first.close()
    other = small(folder=tmp_path / "c", fingerprint="n", folder_limit=5 * each + (1 << 14))
    for n in range(4):
        other.put((n, 7, 0, 0), constant((n, 7, 0, 0)))
        other.flush()
    assert other.stats.file_bytes == sum(path.stat().st_size for path in files(tmp_path / "c"))
    other.close()
    again = small(folder=tmp_path / "c", fingerprint="m")
    left = [tokens for tokens in known if again.find((*tokens, 5))[0]]
    assert known[2] in left
    assert len(left) < 6
    again.close()
    both = small(folder=tmp_path / "c", fingerprint="n")
    assert all(both.find((n, 7, 0, 0, 5))[0] == 4 for n in range(4))
    both.close()


def test_the_fingerprint_tells_models_apart() -> None:
    one, two = make("linear"), make("linear")
    assert fingerprint(one) == fingerprint(two)
    next(two.parameters()).data[0, 0] += 1e-6
    assert len({fingerprint(model) for model in (one, two, make("linear", depth=3), make("linear").double())}) == 4


def truncated(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def flipped(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def swapped(path: Path, rng: random.Random) -> None:
    other = rng.choice([p for p in path.parent.iterdir() if p != path and p.is_file()])
    path.write_bytes(other.read_bytes())


def nonsense(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(rng.randrange(5000)))


def linked(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def renamed(path: Path, rng: random.Random) -> None:
    path.rename(path.with_name(rng.choice(["x.safetensors", f".{path.name}.abc", f"{path.name}.damaged"])))


FAULTS = [truncated, flipped, swapped, nonsense, linked, renamed]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("when", ["before", "while"])
def test_a_broken_file_is_a_miss(fault: Any, when: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever happens to a file, before the server starts or while it runs, each answer is right or a miss."""
    for round in range(12):
        caplog.clear()
        folder, rng = tmp_path / f"c{round}", random.Random(round)
        known = filled(folder)
        cache = small(folder=folder, fingerprint="m") if when == "while" else None
        (owner,) = (path for path in folder.glob("*/*") if path.is_dir())
        path = rng.choice(sorted(owner.iterdir()))
        fault(path, rng)
        cache = cache or small(folder=folder, fingerprint="m")
        found = [cache.find((*tokens, 5)) for tokens in known]
        assert all(same(state, constant(tokens)) for tokens, (count, state) in zip(known, found, strict=True) if count)
        lost = [tokens for tokens, (count, _) in zip(known, found, strict=True) if not count]
        assert len(lost) == 1
        assert str(owner) in caplog.records[0].getMessage()
        cache.put(lost[0], constant(lost[0]))
        cache.close()
        again = small(folder=folder, fingerprint="m")
        assert all(again.find((*tokens, 5))[0] == 4 for tokens in known)
        again.close()


def test_what_a_lost_state_was_continued_by_is_lost_too(tmp_path: Path) -> None:
    cache = small(folder=tmp_path / "c", fingerprint="m", room=room, like=room(1))
    long = (1,) * 40
    for count in range(EVERY, 41, EVERY):
        cache.put(long[:count], growing(long[:count]))
    cache.close()
    for round in range(10):
        cache = small(folder=tmp_path / "c", fingerprint="m", room=room, like=room(1))
        rng, left = random.Random(round), files(tmp_path / "c")
        if round % 2 == 0 and left:
            flipped(rng.choice(left), rng)
        count, state = cache.find((*long, 1))
        assert same(state, growing(long[:count]) if count else None)
        for more in range(count + EVERY, 41, EVERY):
            cache.put(long[:more], growing(long[:more]))
        assert cache.find((*long, 1))[0] == 40
        cache.close()
        if round % 2:
            rng.choice(files(tmp_path / "c")).unlink()  # while no server runs
    cache = small(folder=tmp_path / "c", fingerprint="m", room=room, like=room(1))
    count, state = cache.find((*long, 1))
    assert same(state, growing(long[:count]) if count else None)
    cache.close()


def test_a_full_disk_fails_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = small(folder=tmp_path / "c", fingerprint="m")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(states, "write_whole", full)
        for n in range(5):
            cache.put((n, 0, 0, 0), constant((n, 0, 0, 0)))
            cache.flush()
            assert cache.find((n, 0, 0, 0, 1))[0] == 4
    assert (cache.stats.unwritten, cache.stats.files) == (5, 0)
    assert [record.getMessage() for record in caplog.records] == [  # once, not for every state
        "states are not written to the cache's folder now: [Errno 28] No space left on device"
    ]
    cache.put((9, 0, 0, 0), constant((9, 0, 0, 0)))
    cache.flush()
    assert cache.stats.files == 1
    cache.close()


def test_a_folder_that_vanishes_fails_no_request(tmp_path: Path) -> None:
    import shutil

    known = filled(tmp_path / "c")
    cache = small(folder=tmp_path / "c", fingerprint="m")
    shutil.rmtree(tmp_path / "c")
    assert all(cache.find((*tokens, 5)) == (0, None) for tokens in known)
    for tokens in known:
        cache.put(tokens, constant(tokens))
    cache.flush()
    assert all(cache.find((*tokens, 5))[0] == 4 for tokens in known)
    assert cache.stats.unwritten == 6
    cache.close()


def test_the_disk_has_a_limit_too(tmp_path: Path) -> None:
    cache = small(1 << 20, folder=tmp_path / "c", fingerprint="m", folder_limit=60_000)
    size_of_one = 0
    for n in range(200):
        tokens = (n, 0, 0, 0)
        cache.put(tokens, constant(tokens))
        cache.find((0, 0, 0, 0, 1))  # used all the time, so it stays
        cache.flush()
        on_disk = sum(path.stat().st_size for path in files(tmp_path / "c"))
        assert cache.stats.file_bytes == on_disk <= 60_000
        size_of_one = size_of_one or on_disk
    assert cache.stats.files > 10
    assert cache.stats.entries == 200
    cache.close()
    again = small(1 << 20, folder=tmp_path / "c", fingerprint="m", folder_limit=3 * size_of_one)
    assert again.stats.files == 3
    assert again.find((199, 0, 0, 0, 1))[0] == 4
    again.close()


def test_states_that_left_memory_come_back_from_disk(tmp_path: Path) -> None:
    for how in ({}, {"room": room, "like": room(1)}):
        cache = small(1500, folder=tmp_path / f"c{len(how)}", fingerprint="m", folder_limit=1 << 20, **how)
        rng, known = random.Random(0), dict[tuple[int, ...], State]()
        for _ in range(300):
            tokens = draws(rng)
            tokens = tokens[: len(tokens) // EVERY * EVERY] or (1, 0, 0, 0)
            known[tokens] = growing(tokens) if how else constant(tokens)
            cache.put(tokens, known[tokens])
            cache.flush()
            asked = rng.choice(list(known))
            count, state = cache.find((*asked, 1))
            assert count == len(asked)
            assert same(state, known[asked])
        assert cache.stats.evicted > 100
        assert cache.stats.loaded > 100
        cache.close()


def test_a_closed_cache_leaves_the_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = filled(tmp_path / "c")
    cache = small(folder=tmp_path / "c", fingerprint="m")
    assert cache.find((*known[0], 5))[0] == 4
    writing = threading.Event()

    def wait(*args: Any) -> None:
        writing.set()
        while not cache.ended:
            time.sleep(0.001)
        write_whole(*args)

    monkeypatch.setattr(states, "write_whole", wait)
    for n in range(10, 15):
        cache.put((n, 0, 0, 0), constant((n, 0, 0, 0)))
    writing.wait()
    cache.close(0.0)  # a disk that is too slow: the state that is being written is the last
    assert cache.stats.files == 7
    kept = {path: path.stat().st_mtime_ns for path in files(tmp_path / "c")}
    assert len(kept) == 7
    assert cache.find((*known[0], 5))[0] == cache.find((14, 0, 0, 0, 1))[0] == 4  # from memory
    assert cache.find((*known[1], 5)) == (0, None)
    cache.put((20, 0, 0, 0), constant((20, 0, 0, 0)))
    cache.close()
    assert {path: path.stat().st_mtime_ns for path in files(tmp_path / "c")} == kept


def test_a_copy_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = small()

    def full(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_own", full)
        with pytest.raises(MemoryError):
            cache.put((1, 2, 3, 4), constant((1, 2, 3, 4)))
    assert cache.roots == {}
    assert cache.stats.bytes == 0


def test_only_one_server_uses_a_folder(tmp_path: Path) -> None:
    cache = small(folder=tmp_path / "c", fingerprint="m")
    with pytest.raises(ValueError, match="is in use: another server keeps its states there"):
        small(folder=tmp_path / "c", fingerprint="m")
    cache.close()
    small(folder=tmp_path / "c", fingerprint="m").close()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="accepted is a new or empty folder, or one of an earlier cache"):
        small(folder=tmp_path, fingerprint="m")
    with pytest.raises(ValueError, match=r"but .* is a file"):
        small(folder=tmp_path / "thesis.txt", fingerprint="m")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


KILLED = """
import os, random, signal, sys
from pathlib import Path
import torch
from tests.serve.test_cache import EVERY, constant, growing, room, small

def serve(folder, seed):
    rng = random.Random(seed)
    cache = small(20_000, folder=folder, fingerprint="m", room=room, like=room(1), folder_limit=200_000)
    while True:
        os.write(rounds, b"x")
        tokens = tuple(rng.randrange(2) for _ in range(EVERY * rng.randrange(1, 12)))
        count, _ = cache.find(tokens)
        for n in range(count + EVERY, len(tokens) + 1, EVERY):
            cache.put(tokens[:n], growing(tokens[:n]))

rng = random.Random(0)
for seed in range(20):
    seen, rounds = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            serve(Path(sys.argv[1]), seed)
        finally:
            os._exit(1)
    os.close(rounds)
    for _ in range(rng.randrange(1, 30)):
        assert os.read(seen, 1) == b"x", "the cache did not open"
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(seen)
    assert os.WTERMSIG(status) == signal.SIGKILL, status
print("killed")
"""


def test_kill_9_leaves_no_broken_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, root = tmp_path / "c", Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder)],
        cwd=root, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.stdout == "killed\n", ended.stderr
    assert "is removed: it is damaged" not in ended.stderr
    cache = small(20_000, folder=folder, fingerprint="m", room=room, like=room(1), folder_limit=200_000)
    assert cache.stats.files > 0
    assert not any(path.name.startswith(".") and path.name != ".lock" for path in folder.rglob("*"))
    found = 0
    for tokens in itertools.product((0, 1), repeat=9):
        count, state = cache.find(tokens)
        found += count > 0
        assert same(state, growing(tokens[:count]) if count else None)
    assert found
    assert cache.stats.damaged == 0
    cache.close()


def test_many_threads(tmp_path: Path) -> None:
    cache = small(3000, folder=tmp_path / "c", fingerprint="m", room=room, like=room(1), folder_limit=40_000)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(150):
                tokens, owner = draws(rng), rng.choice(("a", "b"))
                count, state = cache.find(tokens, owner)
                if not same(state, growing(tokens[:count]) if count else None):
                    wrong.append(tokens)
                whole = tokens[: len(tokens) // EVERY * EVERY]
                if whole:
                    cache.put(whole, growing(whole), owner)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache.flush()
    assert wrong == []
    got = cache.stats
    assert got.bytes <= 3000
    assert got.file_bytes == sum(path.stat().st_size for path in files(tmp_path / "c")) <= 40_000
    assert got.damaged == 0
    cache.close()


@pytest.mark.parametrize(
    "kind", ["linear", "linear, softmax", ("gated_deltanet", ("local", {"window": 5})), "gmlp"], ids=str
)
def test_sets_of_requests_get_the_same_text_with_the_cache_and_without(kind: Any, tmp_path: Path) -> None:
    """200 different sets in all, through the engine: states leave memory, come back from disk, and outlive it."""
    more = {"depth": 1 if kind in ("linear", "gmlp") else 2, **({"max_length": 40} if kind == "gmlp" else {})}
    model, folder = engines.make(kind, **more), tmp_path / "c"
    limit = 3 * bytes_per_stream(model, 12)

    def begin() -> tuple[PrefixCache, Engine]:
        cache = PrefixCache.of(model, limit, every=4, early=(1, 2), folder=folder, folder_limit=1 << 20)
        return cache, Engine(model, slots=4, capacity=40, cache=cache)

    plain, (cache, cached) = Engine(model, slots=4, capacity=40, piece=4, early=(1, 2)), begin()
    hits = loaded = evicted = 0
    rng = random.Random(str(kind))
    for number in range(50):
        if number % 5 == 0:  # a few sets begin alike
            starts = engines.random_starts(rng)
        requests = engines.random_requests(rng, 4, starts, sampling=engines.GREEDY, logprobs=1)
        requests = [dataclasses.replace(r, owner="ab"[n == 0]) for n, r in enumerate(requests)]
        assert engines.answers(cached, requests) == engines.answers(plain, requests), number
        if number % 25 == 24:
            cache.close()
            hits, loaded, evicted = (
                total + getattr(cache.stats, name)
                for total, name in ((hits, "hits"), (loaded, "loaded"), (evicted, "evicted"))
            )
            assert cache.stats.damaged == cache.stats.unwritten == 0
            cache, cached = begin()
    cache.close()
    assert hits > 60
    assert loaded > 5
    assert evicted > 10
