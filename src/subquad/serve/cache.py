"""The exact prefix cache: a tree of tokens, with the states of a model after some of them.

States lie at borders, after multiples of `every` tokens and at a few places before the first of them. A prompt that is
read in pieces between these borders, from its first token on and alone in its batch, is read the same way with a cached
state and without one: on a CPU the numbers are equal bit by bit. A state after any other number of tokens, where a
prompt was read to its end, serves only prompts that are read to the same place: their last piece is the same too.

A state of constant size is kept whole. Of a growing one, such as keys and values, each entry keeps only the rows after
those of the entry that it continues; so a long prompt costs memory once, not once for every border.
"""

import functools
import itertools
import math
import queue
import secrets
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import subquad
from subquad.checks import check_count, check_device, counts, refuse
from subquad.disk import logger
from subquad.models.decoding import decoder_of
from subquad.models.footprint import imagine
from subquad.models.saving import digest_tensors, tensors_of
from subquad.models.state import State, batch_of, leaves, map_state, positions
from subquad.serve.borders import EARLY, EVERY, border_after, is_border
from subquad.serve.cache_folder import CacheFolder, hash_owner

WIDTH = 4  # bytes of a token in the tree
ALIGNED = 64  # bytes: tensors begin at multiples of it


class Stats(NamedTuple):
    """Counts of a cache; those from `hits` on are totals since it was made."""

    entries: int  # states in memory
    bytes: int  # that they and the tokens before them take
    limit: int
    files: int  # states on disk, also of other models
    file_bytes: int
    hits: int
    misses: int
    hit_tokens: int  # tokens that did not have to be read again
    stored: int
    evicted: int  # states that left memory to make room
    loaded: int  # states that came back from disk
    damaged: int  # files that could not be used
    unwritten: int  # states that could not be written, such as to a full disk


class Kept(NamedTuple):
    """A state in memory."""

    state: State  # of growing tensors, only the rows that `base` does not have
    bytes: int
    ready: Any  # an event of the GPU, after which the state has been copied; None on a CPU


class Node:
    """A place in the tree: a border, whose parent is the one before; or an end, which has no children."""

    __slots__ = ("base", "children", "depth", "file", "kept", "key", "live", "owner", "parent")

    def __init__(self, parent: "Node | None", key: bytes, depth: int, owner: str):
        self.parent, self.key, self.depth, self.owner = parent, key, depth, owner
        self.children: dict[bytes, Node] = {}
        self.kept: Kept | None = None
        self.file: Path | None = None
        self.base: Node | None = None  # the node whose rows this one's growing tensors continue
        self.live = 0  # states in memory, here and below

    @property
    def usable(self) -> bool:
        return self.kept is not None or self.file is not None


class PrefixCache:
    """cache = PrefixCache.of(model, 4 << 30)            # at most 4 GiB

    count, state = cache.find(tokens)                 # the longest prefix that is known: (its length, its state)
    cache.put(tokens[:256], state)                    # the state after exactly these tokens

    limit         bytes of states in memory, with the tokens before them
    every         borders lie after multiples of this number of tokens
    early         and after so many
    folder        where states at borders outlive the server; they are written in the background
    folder_limit  bytes of the files, of all models together; by default four times `limit`
    fingerprint   what tells this model's files from those of another
    like          a state of the model for one stream, on its device, such as init_state(1)
    device        where states are kept; by default in host memory, which is pinned if the model is on a GPU
    room          room(n): a state with room for n tokens, which may be a fake one; None: no tensor of a state grows

    States of different owners, such as API keys, never meet. The least recently used states leave first. All methods
    may be called from any thread.
    """

    def __init__(
        self,
        limit: int,
        *,
        every: int = EVERY,
        early: tuple[int, ...] = EARLY,
        folder: Path | None = None,
        folder_limit: int | None = None,
        fingerprint: str = "",
        like: State,
        device: str | torch.device = "cpu",
        room: Callable[[int], State] | None = None,
    ):
        check_count("limit", limit)
        check_count("every", every)
        if not isinstance(early, tuple) or not counts(early):
            refuse("early", early, "a tuple of numbers of tokens")
        check_count("folder_limit", 1 if folder_limit is None else folder_limit)
        check_device("device", device, meta=False)
        if folder_limit is not None and folder is None:
            refuse("folder_limit", folder_limit, "None without a folder")
        if folder is not None and not fingerprint:
            refuse("fingerprint", fingerprint, "that of the model, as its files must be told from those of others")
        self.limit, self.every, self.early, self.like = limit, every, early, like
        self.kept_on = torch.device(device)
        self.folder_limit = 4 * limit if folder_limit is None else folder_limit
        self.device = next(leaves(like))[1].device
        self.rows = functools.lru_cache(4096)(functools.partial(_rows, room or (lambda _: like)))
        self.growing = [one != many for one, many in zip(self.rows(1), self.rows(4096), strict=True)]
        self.roots: dict[str, Node] = {}
        self.order: OrderedDict[Node, None] = OrderedDict()  # states in memory, the least recently used first
        self.files: OrderedDict[Node, int] = OrderedDict()  # those on disk, with their sizes
        self.bytes = self.file_bytes = 0
        self.hits = self.misses = self.hit_tokens = self.stored = self.evicted = self.loaded = 0
        self.damaged = self.unwritten = 0
        self.lock = threading.RLock()
        self.key = secrets.token_bytes(32)
        self.folder: CacheFolder | None = None
        self.waiting: queue.Queue[Node | None] = queue.Queue()
        self.writer: threading.Thread | None = None
        self.ended = False  # what still waits is not written
        if folder is not None:
            self.folder = CacheFolder(Path(folder), fingerprint, every, early, like)
            self.key = self.folder.key
            self._take_over()
            self.writer = threading.Thread(target=self._write, name="cache", daemon=True)
            self.writer.start()

    @classmethod
    def of(
        cls,
        model: Any,
        limit: int,
        *,
        every: int = EVERY,
        early: tuple[int, ...] = EARLY,
        folder: Path | None = None,
        folder_limit: int | None = None,
        device: str | torch.device = "cpu",
    ) -> "PrefixCache":
        """The cache of a model."""
        decoder = decoder_of(model)
        with torch.no_grad():
            like = decoder.init_state(1, 1)
        return cls(
            limit, every=every, early=early, folder=folder, folder_limit=folder_limit, like=like, device=device,
            fingerprint="" if folder is None else fingerprint(model), room=functools.partial(imagine, decoder),
        )  # fmt: skip

    def find(self, tokens: Sequence[int], owner: str = "") -> tuple[int, State | None]:
        """The longest known prefix of the tokens that leaves at least one to read: (its length, its state).

        It ends at a border, or right before the last token.
        The state is a copy on the model's device, for one stream; (0, None) if no prefix is known. A growing one has
        room for these tokens only: give it as much room as the states have that are read without the cache, because
        sums over more empty places are rounded differently.
        """
        data = array("i", tokens[:-1]).tobytes()
        with self.lock:
            for node in reversed(self._walk(hash_owner(owner, self.key), data)):
                if not node.usable:
                    continue
                if (chain := self._chain(node)) is None:
                    self._forget(node)
                    continue
                self._touch(line(node))
                if self.folder is not None and node.file is not None:
                    self.folder.touch(node.file)
                self.hits += 1
                self.hit_tokens += node.depth
                state = self._assemble(chain)
                self._evict()
                return node.depth, state
            self.misses += 1
            self._evict()
            return 0, None

    def put(self, tokens: Sequence[int], state: State, owner: str = "") -> None:
        """Keep the state after exactly these tokens; a copy is kept, so the state may be changed afterwards."""
        count = len(tokens)
        if count == 0:
            raise ValueError("tokens is empty: accepted are the tokens that the state has seen, at least one")
        if (rows := batch_of(state)) != 1:
            raise ValueError(f"state has batch {rows}: accepted is the state of one stream; pick it with select")
        if self.device.type == "cpu" and any(int(part) != count for part in positions(state)):
            raise ValueError(f"state has not seen exactly the {count} tokens: accepted is the state after all of them")
        data = array("i", tokens).tobytes()
        with self.lock:
            *before, node = self._walk(hash_owner(owner, self.key), data, make=True)
            if node.kept is None:
                try:
                    if node.file is None or not intact(node):
                        self._drop_file(node)
                        node.base = next((n for n in reversed(before) if self._continues(n)), None)
                    kept = self._own(state, node)
                    if kept.bytes > self.limit:  # it would only make all others leave
                        return
                    self._keep(node, kept)
                finally:
                    self._prune(node)  # if nothing is kept there
                self.stored += 1
                if self.folder is not None and node.file is None and is_border(count, self.every, self.early):
                    self.waiting.put(node)
            self._touch(line(node))
            self._evict()

    @property
    def stats(self) -> Stats:
        """Without the lock, which a reader of the disk holds: the event loop asks, and must not wait for that."""
        return Stats(
            len(self.order), self.bytes, self.limit, len(self.files), self.file_bytes, self.hits, self.misses,
            self.hit_tokens, self.stored, self.evicted, self.loaded, self.damaged, self.unwritten,
        )  # fmt: skip

    def flush(self) -> None:
        """Wait until all states that wait for it are on disk."""
        self.waiting.join()

    def close(self, seconds: float = 10.0) -> None:
        """Write what waits to be written, for at most so long, and let another process use the folder."""
        if self.writer is None or self.folder is None:
            return
        self.waiting.put(None)
        self.writer.join(seconds)
        self.ended = True
        self.writer.join()
        with self.lock:
            self.folder.close()
            self.folder = self.writer = None

    # The tree

    def _walk(self, owner: str, data: bytes, make: bool = False) -> list[Node]:
        """The nodes along these tokens, as far as there are any; `make` adds those that lack."""
        if (node := self.roots.get(owner)) is None:
            node = Node(None, b"", 0, owner)
            if make:
                self.roots[owner] = node
        path, count = [], len(data) // WIDTH
        while node.depth < count:
            end = min(border_after(node.depth, self.every, self.early), count)
            key = data[WIDTH * node.depth : WIDTH * end]
            child = node.children.get(key)
            if child is None:
                if not make:
                    break
                child = node.children[key] = Node(node, key, end, owner)
            path.append(child)
            node = child
        return path

    def _prune(self, node: Node | None) -> None:
        """Cut off the end of a branch that leads to no state."""
        while node is not None and not node.usable and not node.children:
            if node.parent is None:
                self.roots.pop(node.owner, None)
            elif node.parent.children.get(node.key) is node:
                del node.parent.children[node.key]
            node = node.parent

    def _touch(self, nodes: list[Node]) -> None:
        """Mark as used just now: a state, and then those that it continues, so that it leaves before them."""
        for node in nodes:
            if node in self.order:
                self.order.move_to_end(node)
            if node in self.files:
                self.files.move_to_end(node)

    def _evict(self) -> None:
        while self.bytes > self.limit and self.order:
            node = next(iter(self.order))
            self._drop(node)
            self.evicted += 1
            self._prune(node)

    def _keep(self, node: Node, kept: Kept) -> None:
        node.kept = kept
        self.order[node] = None
        self.bytes += kept.bytes
        for place in above(node):
            place.live += 1
            self.bytes += len(place.key) * (place.live == 1)

    def _drop(self, node: Node) -> None:
        if node.kept is None:
            return
        self.bytes -= node.kept.bytes
        node.kept = None
        del self.order[node]
        for place in above(node):
            place.live -= 1
            self.bytes -= len(place.key) * (place.live == 0)

    def _forget(self, node: Node) -> None:
        """Remove a state from memory and from disk."""
        self._drop(node)
        self._drop_file(node)
        self._prune(node)

    # States

    def _continues(self, node: Node) -> bool:
        """Whether later states can share rows with this node's."""
        return any(self.growing) and node.kept is not None and intact(node) and any(self._shared(node))

    def _shared(self, base: Node | None) -> list[int]:
        """How many rows of each tensor a later state shares with the whole state of `base`, counted from row `edge`.

        Rows once written stay, but for two kinds: a window at the beginning, and rows at the end that later tokens
        still add to. Neither has more rows than a state of one token, which are `edge`.
        """
        if base is None:  # as always where nothing grows
            return [0] * len(self.growing)
        sizes = zip(self.growing, self.rows(1), self.rows(base.depth), strict=True)
        return [max(0, before - 2 * edge) if grows else 0 for grows, edge, before in sizes]

    def _own(self, state: State, node: Node) -> Kept:
        """A copy of what a state has and the node's base has not."""
        tensors, columns = [tensor for _, tensor in leaves(state)], list[list[Tensor]]()
        rows = self.rows(node.depth) if any(self.growing) else self.rows(1)
        layout = zip(tensors, self.growing, self._shared(node.base), self.rows(1), rows, strict=True)
        for tensor, grows, shared, edge, count in layout:
            if shared:
                columns.append([tensor[:, :edge], tensor[:, edge + shared : count]])
            else:
                columns.append([tensor[:, :count] if grows else tensor])
        return self._copy(columns, state)

    def _copy(self, columns: list[list[Tensor]], like: State) -> Kept:
        """A state with a copy of these parts for each tensor, in one piece of memory, where the cache keeps it."""
        on_gpu = self.device.type == "cuda"
        shapes = [_shape(parts) for parts in columns]
        sizes = [math.prod(shape) * parts[0].element_size() for shape, parts in zip(shapes, columns, strict=True)]
        *starts, total = itertools.accumulate((-(-n // ALIGNED) * ALIGNED for n in sizes), initial=0)
        pinned = on_gpu and self.kept_on.type == "cpu"  # one piece, because making pinned memory stops the GPU
        block = torch.empty(total, dtype=torch.uint8, device=self.kept_on, pin_memory=pinned)
        own = []
        for start, size_, shape, parts in zip(starts, sizes, shapes, columns, strict=True):
            own.append(_fill(block[start : start + size_].view(parts[0].dtype).view(shape), parts))
        ready = None
        if on_gpu:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self.device))
        ordered = iter(own)
        taken = 1 << (total - 1).bit_length() if pinned else total  # torch rounds pinned memory up
        return Kept(map_state(lambda _: next(ordered), like), taken, ready)

    def _assemble(self, chain: list[tuple[Node, Kept]]) -> State:
        """The whole state of the first node, on the model's device, from its own rows and those that it shares."""
        for _, kept in chain:
            if kept.ready is not None:
                torch.cuda.current_stream(self.device).wait_event(kept.ready)
        own = [[tensor for _, tensor in leaves(kept.state)] for _, kept in chain]
        shared = [self._shared(node.base) for node, _ in chain]
        made = []
        for number, edge in enumerate(self.rows(1)):
            parts = [own[0][number]]
            if shared[0][number]:
                parts, end = [own[0][number][:, edge:]], edge + shared[0][number]  # rows from `end` on are there
                for tensors, counts in zip(own[1:], shared[1:], strict=True):
                    count = counts[number]  # this node has rows 0 to edge, and those from edge + count on
                    parts.append(tensors[number][:, edge : end - count])
                    end = edge + count
                    if not count:
                        break
                parts = [own[0][number][:, :edge], *reversed(parts)]
            made.append(_fill(torch.empty(_shape(parts), dtype=parts[0].dtype, device=self.device), parts))
        ordered = iter(made)
        return map_state(lambda _: next(ordered), chain[0][1].state)

    def _chain(self, node: Node) -> list[tuple[Node, Kept]] | None:
        """The node and those that it continues, all in memory; None if one of them is lost."""
        chain = []
        for part in line(node):
            if part.kept is None and not self._load(part):
                return None
            if part.kept is not None:
                chain.append((part, part.kept))
        return chain

    # Files

    def _take_over(self) -> None:
        """The states that earlier servers left in the folder; they are read when they are needed.

        Those of other models only take room, and lie outside the tree.
        """
        assert self.folder is not None
        found = []
        for owner, file in self.folder.scan():
            path = self._walk(owner, file.tokens, make=True) if file.tokens else [Node(None, b"", 0, "")]
            node = path[-1]
            node.file, self.files[node] = file.path, file.size
            node.base = next((place for place in path[:-1] if place.depth == file.base), None)
            self.file_bytes += file.size
            found.append(node)
        for node in found:
            if intact(node):
                self._touch(line(node))
            else:
                logger.warning("%s is removed: a state that it continues is gone", node.file)
                self._forget(node)
        self._evict_files()

    def _load(self, node: Node) -> bool:
        """Read a state from disk into memory; whether it could be read."""
        if self.folder is None or node.file is None:
            return False
        state = self.folder.read(node.file, tokens_of(node))
        if state is None:
            self.damaged += 1
            self._drop_file(node)
            return False
        self._keep(node, self._copy([[tensor] for _, tensor in leaves(state)], state))
        self.loaded += 1
        return True

    def _write(self) -> None:
        """Write states to disk, one after the other, in a thread of its own."""
        failing = False
        while True:
            node = self.waiting.get()
            try:
                if node is None:
                    return
                if self.ended:
                    continue
                self._write_one(node)
                failing = False
            except Exception as error:  # such as a full disk: the states in memory still serve
                self.unwritten += 1
                if not failing:
                    logger.warning("states are not written to the cache's folder now: %s", error)
                failing = True
            finally:
                self.waiting.task_done()

    def _write_one(self, node: Node) -> None:
        assert self.folder is not None
        with self.lock:
            kept, base = node.kept, node.base
            if kept is None or node.file is not None:
                return
            if base is not None and base.file is None:
                raise OSError("the state that it continues is not there")
            tokens = tokens_of(node)
            self._evict_files(self.folder.bytes_of(kept.state, tokens))
            path = self.folder.path_of(node.owner, tokens)
        if kept.ready is not None:
            kept.ready.synchronize()
        written = self.folder.write(path, tokens, 0 if base is None else base.depth, kept.state)
        with self.lock:
            if node.kept is not kept or (base is not None and base.file is None):  # it has left meanwhile
                self.folder.remove(path)
                return
            node.file, self.files[node] = path, written
            self.file_bytes += written
            self._touch(line(node))
            self._evict_files()

    def _evict_files(self, more: int = 0) -> None:
        """Make room on disk for a file of `more` bytes."""
        if more > self.folder_limit:
            raise OSError(f"a state takes {more:,} bytes there, and folder_limit is {self.folder_limit:,}")
        while self.file_bytes + more > self.folder_limit and self.files:
            node = next(iter(self.files))
            self._drop_file(node)
            self._prune(node)

    def _drop_file(self, node: Node) -> None:
        if node.file is not None:
            if self.folder is not None:  # not closed: the file may be another server's by now
                self.folder.remove(node.file)
            self.file_bytes -= self.files.pop(node)
            node.file = None


def line(node: Node) -> list[Node]:
    """A node and those that it continues, one after the other."""
    nodes = [node]
    while nodes[-1].base is not None:
        nodes.append(nodes[-1].base)
    return nodes


def intact(node: Node) -> bool:
    """Whether a node's state, and all that it continues, are in memory or on disk."""
    return all(part.usable for part in line(node))


def above(node: Node) -> Iterator[Node]:
    """A node and all places between it and the beginning."""
    place: Node | None = node
    while place is not None:
        yield place
        place = place.parent


def tokens_of(node: Node) -> bytes:
    """All tokens from the beginning to a node."""
    return b"".join([place.key for place in above(node)][::-1])


def fingerprint(model: Any) -> str:
    """What the bits of a state depend on besides tokens, hashed: weights, config, versions, and how numbers are added.

    ValueError if the config holds code.
    """
    if model.device.type == "cuda":
        machine: list[Any] = [torch.cuda.get_device_name(model.device)]
    else:
        machine = [torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    header = {
        "model": type(model).__name__,
        "config": model.config.to_dict(),
        "versions": [subquad.__version__, torch.__version__],
        "machine": [model.device.type, *machine],
    }
    tensors = {name: tensor.detach().cpu() for name, tensor in tensors_of(model).items()}
    return digest_tensors(tensors, header)


def _rows(room: Callable[[int], State], count: int) -> list[int]:
    """The second size of each tensor of a state with room for `count` tokens; 0 if it has none."""
    return [tensor.shape[1] if tensor.ndim > 1 else 0 for _, tensor in leaves(room(count))]


def _shape(parts: list[Tensor]) -> list[int]:
    """Of the parts, one after the other in the second dimension."""
    first = parts[0]
    return list(first.shape) if len(parts) == 1 else [1, sum(part.shape[1] for part in parts), *first.shape[2:]]


def _fill(whole: Tensor, parts: list[Tensor]) -> Tensor:
    """Copy the parts into a tensor, one after the other; a GPU is not waited for."""
    if len(parts) == 1:
        return whole.copy_(parts[0], non_blocking=True)
    at = 0
    for part in parts:
        whole[:, at : at + part.shape[1]].copy_(part, non_blocking=True)
        at += part.shape[1]
    return whole
