"""Generation by any causal model: the prompt in parallel, then one token a step from a state in fixed memory.

A state is whatever the layers' mechanisms declare: sums of constant size, a window, a cache. A model with a layer that
has none recomputes the prefix, and the tokens so far are its state. The loop is the same for all.

On a GPU a few steps are captured once as a CUDA graph and replayed; the batch is cut into lanes whose kernels overlap,
so that the matrix products of one lane run while the state of another is read and written.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.mechanisms.base import refuse
from subquad.models import logistic_mixture
from subquad.models.inputs import INTEGERS, check_lengths, shape_of
from subquad.models.sampling import Sampling, draw, make_seeds
from subquad.models.state import State, batch_of, leaves, map_state, rebuild, select, size
from subquad.ops.cache import append

Prompt = Tensor | Sequence[int] | Sequence[Sequence[int]]
Seed = int | Sequence[int] | Tensor

COMPILE_PAYS = 16384  # steps after which compiling, which takes a minute, has paid
WARM = 3  # steps before a capture, in which kernels are compiled and loaded
UNROLL = 8  # steps in one graph, so that lanes need not wait for each other after each
LANES_PAY = 2048  # rows from which two lanes are faster than one
CHECK = 16  # steps between looks at whether all streams have stopped: each look waits for the GPU
PIECE = 1 << 26  # outputs of a prompt held at once


class Generated(NamedTuple):
    tokens: Tensor  # [B, steps], new ones only; a stream that has stopped repeats its stop token
    lengths: Tensor  # [B], new tokens up to and with the stop token
    logprobs: Tensor | None  # [B, steps] of the tokens under the model, before temperature and filters
    state: State  # has seen everything but the last token: generate(tokens[:, -1:], ..., state=state) goes on


class Prefix(NamedTuple):
    """The state of a model without states: the tokens themselves."""

    tokens: Tensor  # [B, C]
    position: Tensor  # [B]


class Recompute:
    """A model with a layer that has no state, behind the methods of one that has: each step reads the prefix."""

    def __init__(self, model: Any):
        self.model = model

    def init_state(self, batch: int, capacity: int | None = None) -> Prefix:
        tokens = torch.zeros(batch, capacity or 64, dtype=torch.int64, device=self.model.device)
        return Prefix(tokens, torch.zeros(batch, dtype=torch.int64, device=tokens.device))

    def prefill(
        self, tokens: Tensor, lengths: Tensor | None = None, state: Prefix | None = None
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


class Loop:
    """Streams in lockstep. `token` [B] is the last token of each, drawn and not yet read; `advance` replaces it."""

    def __init__(
        self,
        model: Any,
        state: State,
        token: Tensor,
        seeds: Tensor,
        sampling: Sampling,
        stop: Sequence[int] = (),
        logprobs: bool = False,
        compile: bool = False,
        lanes: int = 1,
        unroll: int = 1,
    ):
        self.decoder, self.head, self.sampling = decoder_of(model), head_of(model), sampling
        self.state, self.seeds = state, seeds
        batch, device = token.shape[0], token.device
        self.token = token.clone()
        self.done = torch.zeros(batch, dtype=torch.bool, device=device)
        self.stop = torch.tensor(sorted(stop), device=device) if stop else None
        self.logprob = torch.zeros(batch, device=device) if logprobs else None
        penalty = sampling.repetition_penalty != 1
        self.seen = torch.zeros(batch, self.head.values, dtype=torch.bool, device=device) if penalty else None
        self.one = compiled_step() if compile else step
        self.capturing = device.type == "cuda" and not isinstance(self.decoder, Recompute)
        self.group, self.warm = unroll if self.capturing else 1, WARM
        self.record = torch.zeros(self.group, batch, dtype=torch.int64, device=device)
        self.record_logprob = torch.zeros(self.group, batch, device=device) if logprobs else None
        rows = -(-batch // (16 * lanes)) * 16 if self.capturing else batch  # lanes begin where compiled kernels expect
        self.lanes = [slice(start, start + rows) for start in range(0, batch, rows)]
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def advance(self, count: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """`count` more tokens of each stream: ([B], their log-probabilities), valid until the next is asked for."""
        while count > 0:
            steps = min(count, self.group)
            whole = self.capturing and steps == self.group
            if whole and self.graph is None and self.warm <= 0:
                self.graph = self._capture()
            if whole and self.graph is not None:
                self.graph.replay()
            else:
                self._run(steps)
                self.warm -= steps
            count -= steps
            for i in range(steps):
                yield self.record[i], None if self.record_logprob is None else self.record_logprob[i]

    def _run(self, steps: int, side: Sequence["torch.cuda.Stream"] = ()) -> None:
        """A group of steps, lane by lane, on streams of their own where there are `side` streams."""
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
        token, seeds, done = self.token[rows], self.seeds[rows], self.done[rows]
        now = defer(self.decoder, state) if self.group > 1 else state
        for i in range(steps):
            after = self.one(self.decoder, self.head, self.sampling, self.stop, now, token, seeds, done, seen, logprob)
            self.record[i, rows] = token
            if self.record_logprob is not None and logprob is not None:
                self.record_logprob[i, rows] = logprob
        if self.group == 1:
            return after  # a state that grew is another one
        settle(self.decoder, now, steps)
        return state

    def _capture(self) -> "torch.cuda.CUDAGraph | None":
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._run(self.group, [torch.cuda.Stream() for _ in self.lanes[1:]])
        except RuntimeError as error:
            warnings.warn(f"steps run one by one, since they cannot be captured: {error}", stacklevel=2)
            self.capturing = False
            return None
        return graph


def step(
    decoder: Any,
    head: Any,
    sampling: Sampling,
    stop: Tensor | None,
    state: State,
    token: Tensor,
    seeds: Tensor,
    done: Tensor,
    seen: Tensor | None,
    logprob: Tensor | None,
) -> State:
    """Read `token` [B], draw the next one in its place; everything that changes is written where it stands."""
    if seen is not None:
        seen.scatter_(1, token[:, None], torch.ones_like(token[:, None], dtype=torch.bool))
    outputs, state = decoder.step(token, state, inplace=True)
    new = head.draw(outputs, sampling, seeds, position_of(state), seen)
    if logprob is not None:
        logprob.copy_(head.log_prob(outputs, new).masked_fill(done, 0))
    if stop is not None:
        new = torch.where(done, token, new)
        done.logical_or_((new[:, None] == stop).any(1))
    token.copy_(new)
    return state


def defer(decoder: Any, state: State) -> State:
    """The state for a group of steps in which layers may put off what they write, where their mechanism can."""
    inner = state.decoder if hasattr(state, "decoder") else state
    pairs = zip(stack_of(decoder).blocks, inner.layers, strict=True)
    inner = inner._replace(layers=tuple(block.mixer.defer(layer) for block, layer in pairs))
    return state._replace(decoder=inner) if hasattr(state, "decoder") else inner


def settle(decoder: Any, state: State, steps: int) -> None:
    """Write what `steps` steps of a deferred state have put off."""
    layers = (state.decoder if hasattr(state, "decoder") else state).layers
    for block, layer in zip(stack_of(decoder).blocks, layers, strict=True):
        block.mixer.settle(layer, steps)


class Categorical:
    """One logit a token."""

    def __init__(self, values: int):
        self.values = values

    def draw(self, outputs: Tensor, sampling: Sampling, seeds: Tensor, position: Tensor, seen: Tensor | None) -> Tensor:
        return draw(outputs, sampling, seeds, position, seen)

    def log_prob(self, outputs: Tensor, token: Tensor) -> Tensor:
        return outputs.float().log_softmax(-1).gather(-1, token[:, None])[:, 0]


class Mixture:
    """A mixture of discretised logistics; a filter needs the probability of every value, a plain draw does not."""

    values = logistic_mixture.VALUES

    def draw(self, outputs: Tensor, sampling: Sampling, seeds: Tensor, position: Tensor, seen: Tensor | None) -> Tensor:
        if sampling.plain:
            return logistic_mixture.draw(outputs, seeds, position)
        return draw(logistic_mixture.log_probs(outputs), sampling, seeds, position, seen)

    def log_prob(self, outputs: Tensor, token: Tensor) -> Tensor:
        return logistic_mixture.log_prob(outputs, token)


def generate(
    model: Any,
    prompt: Prompt,
    steps: int,
    *,
    lengths: Tensor | None = None,
    state: State | None = None,
    sampling: Sampling | None = None,
    seed: Seed = 0,
    stop: int | Sequence[int] = (),
    logprobs: bool = False,
    compile: bool | None = None,
    lanes: int | None = None,
    full: bool = False,
    told: Callable[[int], None] | None = None,
) -> Any:
    """`steps` new tokens after each prompt: [B, steps], or `Generated` with full=True.

    prompt    tokens [B, T] (right-padded with `lengths`), a list of lists of any lengths, or one row [T]
    state     what came before the prompt: a state of generate, prefill or load_state, left alone
    sampling  Sampling(temperature=..., top_k=..., ...); by default tokens come with the model's probabilities
    seed      one number (streams take seed, seed + 1, ...) or one a stream; a stream's tokens depend on its own alone
    stop      tokens that end a stream
    compile   torch.compile the step; None: where the run is long enough to pay for it
    lanes     parts of the batch whose kernels overlap on a GPU; None: what is fastest
    told      called with the number of tokens made, after each
    """
    tokens, lengths, single = as_prompt(prompt, lengths, model.device)
    unroll = UNROLL if steps >= 8 * UNROLL else 1
    with _evaluating(model):
        loop = _start(
            model, tokens, lengths, steps, state, sampling, seed, stop, logprobs, compile, lanes, unroll=unroll
        )
        out = torch.empty(steps, len(tokens), dtype=torch.int64, device=tokens.device)
        scores = torch.empty(out.shape, device=tokens.device) if logprobs else None
        for i, (token, score) in enumerate(loop.advance(steps)):
            out[i] = token
            if scores is not None and score is not None:
                scores[i] = score
            if told is not None:
                told(i + 1)
            if loop.stop is not None and i % CHECK == CHECK - 1 and i + 1 < steps and bool(loop.done.all()):
                out[i + 1 :], steps = token, i + 1
                if scores is not None:
                    scores[i + 1 :] = 0
                break
    out = out.T.contiguous()
    if not full:
        return out[0] if single else out
    ends = torch.full((len(tokens),), out.shape[1], device=out.device)
    if loop.stop is not None:
        hit = (out[..., None] == loop.stop).any(-1)
        ends = torch.where(hit.any(1), hit.int().argmax(1) + 1, ends)
    return Generated(out, ends, None if scores is None else scores.T.contiguous(), loop.state)


def stream(
    model: Any,
    prompt: Prompt,
    steps: int | None = None,
    *,
    lengths: Tensor | None = None,
    state: State | None = None,
    sampling: Sampling | None = None,
    seed: Seed = 0,
    stop: int | Sequence[int] = (),
    compile: bool | None = None,
    capacity: int | None = None,
) -> Iterator[Any]:
    """The tokens of `generate` as they come: an int at a time for a prompt [T], [B] at a time for [B, T].

    steps     None: until every stream has stopped, or for ever
    capacity  with steps=None, the positions that a growing state holds before it has to grow
    """
    tokens, lengths, single = as_prompt(prompt, lengths, model.device)
    with _evaluating(model):
        loop = _start(model, tokens, lengths, steps, state, sampling, seed, stop, False, compile, 1, capacity=capacity)
        made = 0
        while steps is None or made < steps:
            count = CHECK * 4 if steps is None else steps - made
            for token, _ in loop.advance(count):
                yield int(token[0]) if single else token.clone()
                made += 1
                if loop.stop is not None and bool(loop.done.all()):
                    return


def _start(
    model: Any,
    tokens: Tensor,
    lengths: Tensor | None,
    steps: int | None,
    state: State | None,
    sampling: Sampling | None,
    seed: Seed,
    stop: int | Sequence[int],
    logprobs: bool,
    compile: bool | None,
    lanes: int | None,
    capacity: int | None = None,
    unroll: int = 1,
) -> Loop:
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        refuse("steps", steps, "an integer of at least 1")
    sampling = sampling or Sampling()
    sampling.check(values_of(model))
    stop = (stop,) if isinstance(stop, int) else tuple(stop)
    if any(not 0 <= token < values_of(model) for token in stop):
        refuse("stop", stop, f"tokens from 0 to {values_of(model) - 1}")
    batch, longest = tokens.shape
    before = 0 if state is None else int(position_of(state).max())
    capacity = before + longest - 1 + (steps if steps is not None else max(64, capacity or 0))
    check_memory(model, batch, capacity)
    state = begin(model, tokens, lengths, capacity, state)
    last = torch.full((batch,), longest, device=tokens.device) if lengths is None else lengths
    token = tokens.gather(1, last[:, None] - 1)[:, 0]
    lanes = (2 if batch >= LANES_PAY else 1) if lanes is None else lanes
    seeds = make_seeds(seed, batch, tokens.device)
    compiling = (steps or 0) >= COMPILE_PAYS if compile is None else compile
    # a state that may grow cannot be captured
    loop = Loop(model, state, token, seeds, sampling, stop, logprobs, compiling, lanes, unroll)
    if steps is None and stack_of(model).traits.state == "growing":
        loop.capturing = False
    if loop.seen is not None:
        mark_seen(loop.seen, tokens, lengths)
    return loop


def begin(model: Any, tokens: Tensor, lengths: Tensor | None, capacity: int, state: State | None = None) -> State:
    """The state after all but the last token of each prompt, with room for `capacity` positions; in its own memory."""
    decoder, (batch, longest) = decoder_of(model), tokens.shape
    if state is None and hasattr(model, "encode"):
        raise ValueError("state=None cannot work: a model that reads a source starts from init_state(*encode(source))")
    count = longest - 1
    if state is not None:
        if batch_of(state) != batch:
            raise ValueError(f"state has batch {batch_of(state)}: prompt has batch {batch}; fork makes one into many")
        state = with_capacity(map_state(torch.clone, state), decoder, capacity)
    elif count == 0:
        state = decoder.init_state(batch, capacity)
    piece = max(1, PIECE // (batch * values_of(model)))
    with torch.no_grad():
        for start in range(0, count, piece):
            part = tokens[:, start : min(start + piece, count)]
            left = None if lengths is None else (lengths - 1 - start).clamp(0, part.shape[1])
            # from nothing, not from an empty state: a mechanism then knows that the prompt is all there is
            _, after = decoder.prefill(part, lengths=left, state=state)
            state = after if state is not None else with_capacity(after, decoder, capacity)
    return map_state(lambda tensor: tensor.contiguous(), state)


def with_capacity(state: State, decoder: Any, capacity: int) -> State:
    """The state with as much room as init_state gives: what grows does so at the end of its second dimension."""
    wanted = dict(leaves(_imagine(decoder, capacity)))
    grown = {}
    for name, tensor in leaves(state):
        more = wanted[name].shape[1] - tensor.shape[1] if name in wanted and tensor.ndim > 1 else 0
        grown[name] = tensor
        if more > 0:
            grown[name] = torch.cat((tensor, tensor.new_zeros(len(tensor), more, *tensor.shape[2:])), 1)
    return rebuild(state, grown)


def mark_seen(seen: Tensor, tokens: Tensor, lengths: Tensor | None) -> None:
    """Write the tokens of prompts [B, T] into `seen` [B, V]; padding repeats the first token, which is there anyway."""
    if lengths is not None:
        real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        tokens = torch.where(real, tokens, tokens[:, :1])
    seen.scatter_(1, tokens, torch.ones_like(tokens, dtype=torch.bool))


def decoder_of(model: Any) -> Any:
    """What steps: the model, or the model behind a recomputation of the prefix where a layer has no state."""
    return Recompute(model) if stack_of(model).traits.state is None and hasattr(model, "transformer") else model


def stack_of(model: Any) -> Any:
    """The layers that write."""
    return model.decoder if hasattr(model, "decoder") else model.transformer


def head_of(model: Any) -> Categorical | Mixture:
    """How the model's outputs are a distribution."""
    config = model.config
    if getattr(config, "mixture", None) is not None:
        return Mixture()
    vocab = (config.target if hasattr(config, "target") else config.embedding).vocab
    if getattr(config, "outputs", None) not in (None, vocab):
        raise ValueError(f"outputs={config.outputs} cannot be drawn from: accepted is one logit a token, or mixture=10")
    return Categorical(vocab)


def values_of(model: Any) -> int:
    """Tokens that can be drawn: 0 to this, exclusive."""
    return head_of(model).values


def position_of(state: State) -> Tensor:
    """[B]: tokens that each stream has seen."""
    return state.position if hasattr(state, "position") else state.decoder.position


def compiled_step() -> Callable[..., State]:
    """`step` compiled; where there is no compiler, `step` itself, and a note."""
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
    """Whether inductor, or triton, found nothing to compile with; this happens before anything ran."""
    if error is None:
        return False
    known = type(error).__name__ in ("InvalidCxxCompiler", "TritonMissing") or "C++ compiler" in str(error)
    return known or "C compiler" in str(error) or _lacks_compiler(error.__cause__)


def bytes_per_stream(model: Any, capacity: int) -> int:
    """Memory that one stream's state takes with room for `capacity` positions; nothing is allocated to find out."""
    return size(_imagine(decoder_of(model), capacity))


def largest_batch(model: Any, capacity: int, free: int | None = None) -> int:
    """Streams that fit into the memory that is free on the model's device."""
    return _free(model.device, free) // _bytes_at_work(model, capacity)


def check_memory(model: Any, batch: int, capacity: int, free: int | None = None) -> None:
    """ValueError if so many streams do not fit, with how many do."""
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        refuse("batch", batch, "an integer of at least 1")
    most = largest_batch(model, capacity, free)
    if batch > most:
        state, room = bytes_per_stream(model, capacity), _free(model.device, free)
        raise ValueError(
            f"batch={batch} cannot work: a stream of {capacity} positions holds {state:,} bytes of state, and"
            f" {room:,} bytes are free on {model.device}: accepted is at most {most}"
        )


def _bytes_at_work(model: Any, capacity: int) -> int:
    """A stream's state, its widest layer once more (not every mechanism writes in place), and vectors on their way."""
    decoder = decoder_of(model)
    state = _imagine(decoder, capacity)
    layers = getattr(state.decoder if hasattr(state, "decoder") else state, "layers", (state,))
    stack = stack_of(model).config
    vectors = 4 * (4 * stack.dim + 2 * stack.ff_width) + 16 * values_of(model)
    work = state if isinstance(decoder, Recompute) else defer(decoder, state)
    return size(work) + max(size(layer) for layer in layers) + vectors


def _imagine(decoder: Any, capacity: int) -> State:
    """The shapes of one stream's state, without its memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        if hasattr(decoder, "encode"):
            weight = next(decoder.decoder.parameters())
            return decoder.init_state(weight.new_empty(1, 1, decoder.config.encoder.dim), capacity=capacity)
        return decoder.init_state(1, capacity)


def _free(device: torch.device, free: int | None) -> int:
    if free is not None:
        return free
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(0.95 * (torch.cuda.mem_get_info(device)[0] + unused))
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
        return int(0.95 * 1024 * int(fields["MemAvailable"].split()[0]))
    except (OSError, KeyError):
        return 1 << 62  # nothing is known, so nothing is refused


def as_prompt(prompt: Prompt, lengths: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor | None, bool]:
    """Tokens [B, T], lengths [B] or None, and whether it was one row without a batch."""
    if not isinstance(prompt, Tensor):
        rows = list(prompt)
        if rows and all(isinstance(row, int) for row in rows):
            prompt = torch.tensor(rows)
        else:
            if lengths is not None:
                raise ValueError("lengths came with a list of prompts, which has its own: leave it out")
            if not rows or any(len(row) == 0 for row in rows):  # type: ignore[arg-type]
                raise ValueError("prompt has an empty row: every stream needs a first token, such as a start token")
            parts = [torch.as_tensor(row) for row in rows]
            lengths = torch.tensor([len(part) for part in parts])
            prompt = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    single = prompt.ndim == 1
    tokens = prompt[None] if single else prompt
    if tokens.ndim != 2 or tokens.numel() == 0 or tokens.dtype not in INTEGERS:
        found = f"{prompt.dtype} {shape_of(prompt)}"
        raise ValueError(f"prompt is {found}: accepted are integers [B, T] or [T], at least one a stream")
    lengths = check_lengths(lengths, tokens)
    if lengths is not None and bool((lengths < 1).any()):
        raise ValueError("lengths has a 0: every stream needs a first token, such as a start token")
    if lengths is not None and bool((lengths == tokens.shape[1]).all()):
        lengths = None
    return tokens.to(device, torch.int64), None if lengths is None else lengths.to(device), single


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Dropout has no place here."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
