"""The generation loop: read a token, draw the next one, with any kind of state.

The mechanisms of the layers define the state: sums of constant size, a window, a cache. If a layer has no state, each
step reads the whole prefix again, and the state is the tokens so far. The loop is the same for all.

On a GPU a group of steps is captured once as a CUDA graph and replayed. Within a group a mechanism may delay its
writes; and the batch is cut into lanes whose kernels overlap, so that the matrix products of one lane run while the
state of another is read and written. A loop that has captured its steps is kept for the next call (kept.py): `restart`
copies the state and the settings of another run to where its graphs read them.
"""

import functools
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.graphs import recording
from subquad.models import kept, logistic_mixture
from subquad.models.sampling import Rows, Sampling, Uses, draw, draw_next, score, take_token
from subquad.models.state import State, leaves, select, size
from subquad.models.threads import READ, run_small
from subquad.ops.cache import append

WARM = 3  # steps before a capture, to compile and load kernels


class Prefix(NamedTuple):
    """The state of a model that has a layer without state: the tokens so far."""

    tokens: Tensor  # [B, C]
    position: Tensor  # [B]


class Recompute:
    """Adds the methods of a model with state to one with a stateless layer: each step reads the whole prefix."""

    def __init__(self, model: Any):
        self.model = model

    def init_state(self, batch: int, capacity: int | None = None) -> Prefix:
        tokens = torch.zeros(batch, capacity or 64, dtype=torch.int64, device=self.model.device)
        return Prefix(tokens, torch.zeros(batch, dtype=torch.int64, device=tokens.device))

    def prefill(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        state: Prefix | None = None,
        head: bool = True,  # noqa: ARG002 (the model computes whole outputs)
    ) -> tuple[Tensor, Prefix]:
        return self._read(tokens, lengths, state or self.init_state(*tokens.shape), inplace=False)

    def step(self, tokens: Tensor, state: Prefix, inplace: bool = False) -> tuple[Tensor, Prefix]:
        outputs, state = self._read(tokens[:, None], None, state, inplace)
        return outputs[:, 0], state

    def _read(self, tokens: Tensor, lengths: Tensor | None, state: Prefix, inplace: bool) -> tuple[Tensor, Prefix]:
        first, count = state.position, tokens.shape[1]
        cache = append(state.tokens, tokens, first, inplace=inplace)
        after = first + (count if lengths is None else lengths)
        outputs = self.model(cache[:, : max(1, int(after.max()))], after)
        at = (first[:, None] + torch.arange(count, device=first.device)).clamp(max=outputs.shape[1] - 1)  # [B, T]
        outputs = outputs.gather(1, at[..., None].expand(-1, -1, outputs.shape[-1]))
        return outputs, Prefix(cache, first.copy_(after) if inplace else after)


class Lane(NamedTuple):
    """What a step reads and writes in addition to the state; one row per stream."""

    token: Tensor  # [B], drawn and not yet read
    seeds: Tensor  # [B]
    done: Tensor  # [B], whether a stop token was drawn
    seen: Tensor | None  # [B, V], tokens so far; only with a repetition penalty
    logprob: Tensor | None  # [B], of the token; only if requested
    top: "Top | None" = None  # only if requested


class Top(NamedTuple):
    """The most probable tokens under the model, the best first."""

    logprobs: Tensor  # [B, N] float32
    tokens: Tensor  # [B, N]

    def part(self, rows: slice) -> "Top":
        return Top(self.logprobs[rows], self.tokens[rows])


class Loop:
    """Streams in lockstep. `token` [B] is the last token of each, drawn and not yet read; `advance` replaces it."""

    def __init__(
        self,
        model: Any,
        state: State,
        token: Tensor,
        seeds: Tensor,
        sampling: Sampling | Rows,
        stop: Sequence[int] = (),
        logprobs: bool = False,
        compile: bool = False,
        lanes: int = 1,
        unroll: int = 1,
        top: int = 0,
    ):
        self.decoder, self.head, self.sampling = decoder_of(model), head_of(model), sampling
        self.state, self.seeds = state, seeds
        batch, device = token.shape[0], token.device
        self.token = token.clone()
        self.done = torch.zeros(batch, dtype=torch.bool, device=device)
        self.stop = torch.tensor(sorted(stop), device=device) if stop else None
        self.logprob = torch.zeros(batch, device=device) if logprobs else None
        self.rows = sampling if isinstance(sampling, Rows) else Rows.of([sampling], self.head.values, device)
        self.vocab = vocab_of(model)
        self.seen: Tensor | None = None
        self._make_seen()
        most = min(top, self.head.values)
        self.top = Top(*(torch.zeros(batch, most, dtype=kind, device=device) for kind in (torch.float32, torch.int64)))
        self.tops = False  # whether steps fill `top`
        self.one = compiled_step() if compile else step
        self.capturing = captures(model)
        self.group, self.warm = unroll if self.capturing else 1, WARM
        self.record = torch.zeros(self.group, batch, dtype=torch.int64, device=device)
        self.record_logprob = torch.zeros(self.group, batch, device=device) if logprobs else None
        rows = -(-batch // (16 * lanes)) * 16 if self.capturing else batch  # compiled kernels expect multiples of 16
        self.lanes = [slice(start, start + rows) for start in range(0, batch, rows)]
        # steps for each set of things they do, and for each number of them: a group, or the single steps after the last
        self.graphs: dict[tuple[Uses, bool, int], torch.cuda.CUDAGraph] = {}
        self.work = work_of(model, state, batch)
        self.pools = 0  # bytes that graphs hold for what they compute
        self.stamp: Hashable = kept.stamp(model) if self.capturing else None
        self.parked: torch.cuda.Event | None = None

    @property
    def graph(self) -> "torch.cuda.CUDAGraph | None":
        """What was captured for the present settings."""
        return self.graphs.get((self.rows.uses, self.tops, self.group))

    def restart(self, model: Any, state: State, token: Tensor, seeds: Tensor, rows: Rows, stop: Sequence[int]) -> None:
        """Begin another run with the same `loop_key` where this one was."""
        assert self.parked is not None
        self.parked.wait()  # for the last run, which may have used another stream
        self.decoder = decoder_of(model)
        mine, others = ([tensor for _, tensor in leaves(nest)] for nest in (self.state, state))
        with torch.no_grad():
            torch._foreach_copy_([*mine, self.token, self.seeds], [*others, token, seeds])
            self.done.zero_()
            self.assign(slice(None), rows)
            if self.stop is not None:
                self.stop.copy_(torch.tensor(sorted(stop)))

    @property
    def bytes(self) -> int:
        """What this loop holds: its states and what its graphs compute."""
        tensors = sum(t.numel() * t.element_size() for t in (self.seen, self.rows.exclude) if t is not None)
        return size(self.state) + tensors + self.pools

    def keepable(self, model: Any) -> bool:
        """Whether it would be kept: it has captured steps and is not too large."""
        return self.capturing and bool(self.graphs) and self.bytes <= kept.bound(model)

    def park(self, model: Any, key: Hashable) -> None:
        """Keep this loop, whose run has ended, for another one with this key."""
        if self.keepable(model):
            self.decoder = None
            self.parked = torch.cuda.Event()
            self.parked.record()
            kept.put(model, key, self, self.bytes, self.stamp)

    def refresh(self, model: Any) -> None:
        """Forget what was captured if the weights are not what and where they were."""
        if self.capturing and self.graphs and self.stamp != (now := kept.stamp(model)):
            self.graphs.clear()
            self.stamp, self.warm = now, max(self.warm, 1)

    def configure(self, uses: Uses, tops: bool = False) -> None:
        """What the following steps do for some row: steps for each combination are captured once."""
        if (uses, tops) == (self.rows.uses, self.tops):
            return
        self.rows, self.tops = self.rows._replace(uses=uses), tops
        self._make_seen()
        if self.graph is None:
            self.warm = max(self.warm, 1)  # run it once, so that its kernels are loaded before the capture

    def assign(self, at: Tensor | slice, new: Rows) -> None:
        """Write the settings of rows [N] of the batch; `configure` says what steps do with them."""
        if new.exclude is not None and self.rows.exclude is None:
            empty = torch.zeros(len(self.token), self.head.values, dtype=torch.bool, device=self.token.device)
            self.rows = self.rows._replace(exclude=empty)
        for old, tensor in zip(self.rows[1:], new[1:], strict=True):
            if isinstance(old, Tensor):
                old[at] = False if tensor is None else tensor

    def _make_seen(self) -> None:
        if self.seen is None and self.rows.uses.penalty:
            self.seen = torch.zeros(len(self.token), self.vocab, dtype=torch.bool, device=self.token.device)

    @torch.no_grad()
    def advance(self, count: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """`count` more tokens of each stream: ([B], their log-probabilities), valid until the next one is requested."""
        for tokens, logprobs in self.groups(count):
            for i in range(len(tokens)):
                yield tokens[i], None if logprobs is None else logprobs[i]

    @torch.no_grad()
    def groups(self, count: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The same for as many tokens at once as were made at once, [n, B]."""
        while count > 0:
            steps = min(count, self.group)
            if self.capturing and self.warm <= 0:
                steps = self.group if steps == self.group else 1  # what is left after the last group: one by one
                graph = self.graphs.get((self.rows.uses, self.tops, steps)) or self._capture(steps)
            else:
                graph = None
            if graph is not None:
                graph.replay()
            else:
                # one thread for these steps only: between tokens the user's number of threads applies
                run_small(self.work, functools.partial(self._run, steps))
                self.warm -= steps
            count -= steps
            yield self.record[:steps], None if self.record_logprob is None else self.record_logprob[:steps]

    def mark_seen(self, tokens: Tensor, rows: Tensor | slice = slice(None)) -> None:
        """Set the tokens seen so far to those of the prompts, [B, T]."""
        if self.seen is not None:
            self.seen[rows] = torch.zeros_like(self.seen[rows]).scatter_(1, tokens, True)

    def _run(self, steps: int, side: Sequence["torch.cuda.Stream"] = ()) -> None:
        """A group of steps for each lane; with `side` streams, the second lane and so on run on those."""
        if len(self.lanes) == 1:
            self.state = self._lane(slice(None), self.state, steps)
            return
        main = torch.cuda.current_stream()
        for stream in side:
            stream.wait_stream(main)
        for rows, stream in zip(self.lanes, (main, *side) if side else [main] * len(self.lanes), strict=True):
            with torch.cuda.stream(stream):
                self._lane(rows, select(self.state, rows), steps)
        for stream in side:
            main.wait_stream(stream)

    def _lane(self, rows: slice, state: State, steps: int) -> State:
        seen, logprob = (None if t is None else t[rows] for t in (self.seen, self.logprob))
        top, settings = self.top.part(rows) if self.tops else None, self.rows.part(rows)
        if not settings.uses.penalty:
            seen = None
        lane = Lane(self.token[rows], self.seeds[rows], self.done[rows], seen, logprob, top)
        now = defer(self.decoder, state) if steps > 1 else state
        for i in range(steps):
            after = self.one(self.decoder, self.head, settings, self.stop, now, lane)
            self.record[i, rows] = lane.token
            if self.record_logprob is not None and logprob is not None:
                self.record_logprob[i, rows] = logprob
        if steps == 1:
            return after  # a state that has grown is a new object
        settle(self.decoder, now, steps)
        return state

    def _capture(self, steps: int) -> "torch.cuda.CUDAGraph | None":
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved(self.token.device)
        try:
            with recording(graph):
                self._run(steps, [torch.cuda.Stream() for _ in self.lanes[1:]])
        except RuntimeError as error:
            warnings.warn(f"steps run one by one, because capturing them failed: {error}", stacklevel=2)
            self.capturing = False
            return None
        self.pools += max(0, torch.cuda.memory_reserved(self.token.device) - before)
        self.graphs[self.rows.uses, self.tops, steps] = graph
        return graph


def loop_key(state: State, rows: Rows, stops: int, *made: Any) -> Hashable:
    """What decides which captured steps do a run: shapes, types, and what a step does."""
    shapes = tuple((name, tuple(t.shape), t.stride(), t.dtype, t.device) for name, t in leaves(state))
    return shapes, rows.uses, len(rows.plain), rows.exclude is not None, stops, made


def step(decoder: Any, head: Any, rows: Rows, stop: Tensor | None, state: State, lane: Lane) -> State:
    """Read the token of each stream and draw the next one; the state and the lane are changed in place."""
    token, seeds, done, seen, logprob, top = lane
    if seen is not None:
        seen.scatter_(1, token[:, None], True)
    outputs, state = decoder.step(token, state, inplace=True)
    given = outputs, rows, seeds, position_of(state), None if seen is None else seen[:, : head.values]
    if top is None and type(head) is Categorical:
        head.draw_next(*given, token, done, stop, logprob)
        return state
    new = head.draw(*given)
    if top is not None:
        best = head.log_probs(outputs).topk(top.tokens.shape[-1])
        top.logprobs.copy_(best.values)
        top.tokens.copy_(best.indices)
    if logprob is not None:
        logprob.copy_(head.log_prob(outputs, new).masked_fill(done, 0))
    take_token(new, token, done, stop)
    return state


def defer(decoder: Any, state: State) -> State:
    """The state for a group of steps, in which mixers may write late; `settle` writes the rest."""
    inner: Any = getattr(state, "decoder", state)
    if not hasattr(inner, "layers"):
        return state
    layers = []
    for block, layer in zip(stack_of(decoder).blocks, inner.layers, strict=True):
        tapped = block.taps is not None
        late = block.mixer.defer(layer.mixer if tapped else layer)
        layers.append(layer._replace(mixer=late) if tapped else late)
    inner = inner._replace(layers=tuple(layers))
    return state._replace(decoder=inner) if hasattr(state, "decoder") else inner


def settle(decoder: Any, state: State, steps: int) -> None:
    """Write what a deferred state has not written yet after `steps` steps, into the state that `defer` was given."""
    for number, layer in enumerate(getattr(getattr(state, "decoder", state), "layers", ())):
        block = stack_of(decoder).blocks[number]
        block.mixer.settle(layer if block.taps is None else layer.mixer, steps)


class Categorical:
    """One logit per token."""

    draw, draw_next, score = staticmethod(draw), staticmethod(draw_next), staticmethod(score)

    def __init__(self, values: int):
        self.values = values

    def log_probs(self, outputs: Tensor) -> Tensor:
        return outputs.float().log_softmax(-1)

    def log_prob(self, outputs: Tensor, token: Tensor) -> Tensor:
        return self.log_probs(outputs).gather(-1, token[:, None])[:, 0]


class Mixture:
    """A mixture of discretised logistics; a filter needs the probability of every value, a plain draw does not."""

    values = logistic_mixture.VALUES
    log_prob = staticmethod(logistic_mixture.log_prob)
    log_probs = staticmethod(logistic_mixture.log_probs)

    def draw(self, outputs: Tensor, rows: Rows, seeds: Tensor, position: Tensor, seen: Tensor | None) -> Tensor:
        if not rows.uses.plain:
            return draw(logistic_mixture.log_probs(outputs), rows, seeds, position, seen)
        plain = logistic_mixture.draw(outputs, seeds, position)
        if not rows.uses.adjust:
            return plain
        others = draw(logistic_mixture.log_probs(outputs), rows, seeds, position, seen)
        return torch.where(rows.plain[:, 0], plain, others)

    def score(self, outputs: Tensor, rows: Rows, seeds: Tensor, position: Tensor, seen: Tensor | None) -> Tensor:
        if rows.uses.plain:  # the value is not the largest of 256 numbers, so there is one candidate
            drawn = self.draw(outputs, rows, seeds, position, seen)
            return torch.nn.functional.one_hot(drawn, self.values).to(outputs.dtype)
        return score(logistic_mixture.log_probs(outputs), rows, seeds, position, seen)


def decoder_of(model: Any) -> Any:
    """The model, or `Recompute` of it if a layer has no state."""
    return Recompute(model) if stack_of(model).traits.state is None and hasattr(model, "transformer") else model


def captures(model: Any) -> bool:
    """Whether steps of this model are captured as CUDA graphs: on a GPU, if each layer has a state."""
    return model.device.type == "cuda" and decoder_of(model) is model


def stack_of(model: Any) -> Any:
    """The layers that generate: a Seq2Seq's decoder, otherwise all of them."""
    return model.decoder if hasattr(model, "decoder") else model.transformer


def work_of(model: Any, state: State, tokens: int) -> float:
    """The approximate multiply-adds for reading `tokens` tokens on a CPU, over all streams."""
    if model.device.type != "cpu":
        return math.inf
    if isinstance(state, Prefix):
        tokens *= state.tokens.shape[1]  # each one reads the prefix again
    weights = sum(parameter.numel() for parameter in model.parameters())
    return tokens * weights + READ * sum(tensor.numel() for _, tensor in leaves(state))


def head_of(model: Any) -> Categorical | Mixture:
    """The distribution that the model's outputs describe."""
    config = model.config
    if getattr(config, "mixture", None) is not None:
        return Mixture()
    if getattr(config, "outputs", None) not in (None, vocab_of(model)):
        raise ValueError(f"outputs={config.outputs} cannot be sampled: accepted is one logit per token, or mixture=10")
    return Categorical(vocab_of(model))


def vocab_of(model: Any) -> int:
    """Number of tokens that can be read. A mixture draws 256 values but can read more, such as a start token."""
    config = model.config
    return (config.target if hasattr(config, "target") else config.embedding).vocab


def values_of(model: Any) -> int:
    """Number of tokens that can be drawn: from 0 to this, exclusive."""
    return head_of(model).values


def limit_of(model: Any) -> int | None:
    """The number of positions that a language model has; None: any number."""
    stack = stack_of(model)
    tables = getattr(getattr(model, "embedding", None), "positions", None)
    limits = [None if tables is None else tables.limit]
    for block in getattr(stack, "blocks", ()):
        options = block.mixer.options
        limits += [options.max_length if block.mixer.traits.fixed_length else None, getattr(options, "length", None)]
    return min((limit for limit in limits if limit is not None), default=None)


def position_of(state: State) -> Tensor:
    """[B]: tokens that each stream has seen."""
    return state.position if hasattr(state, "position") else state.decoder.position


def compiled_step() -> Callable[..., State]:
    """`step` compiled; if there is no compiler, `step` itself, with a warning."""
    fast: Callable[..., State] = torch.compile(step, dynamic=False)

    def run(*args: Any) -> State:
        nonlocal fast
        try:
            return fast(*args)
        except Exception as error:
            if fast is step or not _lacks_compiler(error):
                raise
            warnings.warn(f"no compiler was found, so steps run uncompiled: {error}", stacklevel=2)
            fast = step
            return fast(*args)

    return run


def _lacks_compiler(error: BaseException | None) -> bool:
    """Whether inductor or triton found no compiler; they notice before anything has run."""
    signs = "InvalidCxxCompiler", "TritonMissing", "C++ compiler", "C compiler"
    return error is not None and (any(sign in repr(error) for sign in signs) or _lacks_compiler(error.__cause__))
