"""Generation by any causal model: the prompt in parallel, then one token per step from a state in fixed memory."""

import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from subquad import ranks
from subquad.checks import INTEGERS, check_count, check_plain, check_strided, checked, refuse
from subquad.models import kept
from subquad.models.decoding import (
    Loop,
    captures,
    decoder_of,
    limit_of,
    loop_key,
    position_of,
    stack_of,
    values_of,
    vocab_of,
    work_of,
)
from subquad.models.footprint import Rooms, check_fits, largest_batch
from subquad.models.inputs import check_ids
from subquad.models.sampling import Rows, Sampling, SamplingOptions, make_seeds
from subquad.models.saving import Model
from subquad.models.state import State, batch_of, check_state, leaves, map_state
from subquad.models.threads import run_small
from subquad.ops.lengths import check_lengths, shape_of

Prompt = Tensor | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor]
Seed = int | Sequence[int] | Tensor

COMPILE_PAYS = 16384  # compiling takes a minute, which pays from this many steps on
# Measured on an H200 with the paper's MNIST model (results/generation.json): 4, 8 and 16 steps per graph are within
# 1.3% of each other; two lanes lose 5% against one at 10,240 rows and gain 1% at 20,480
UNROLL = 8  # steps in one graph; within it lanes need not wait for each other
LANES_PAY = 16384  # rows from which two lanes are faster than one
CHECK = 16  # steps between checks whether all streams have stopped: each check waits for the GPU
PIECE = 1 << 26  # numbers in the vectors of a prompt that a CPU holds at once
PART = 32  # on a GPU: bytes of its memory for each such number


class Generated(NamedTuple):
    """What generate(..., full=True) returns. To continue, pass the last token again: the state has not seen it yet."""

    tokens: Tensor  # [B, steps], only new ones; a stream that has stopped repeats its stop token
    lengths: Tensor  # [B], number of new tokens, including the stop token
    logprobs: Tensor | None  # [B, steps] of the tokens under the model, before temperature and filters
    state: State  # has seen everything but the last token


@checked
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
    **options: Unpack[SamplingOptions],
) -> Any:
    """`steps` new tokens after each prompt: [B, steps], or `Generated` with full=True.

    prompt    tokens [B, T] (right-padded with `lengths`), a list of lists of any lengths, or one row [T]
    state     what came before the prompt: a state from generate, prefill or load_state, which is not changed. A
              repetition penalty ignores the tokens in it
    sampling  Sampling(temperature=..., top_k=..., ...); by default tokens are drawn with the model's probabilities.
              temperature, top_k, top_p, min_p, repetition_penalty and exclude may also be passed as keywords
    seed      one number (streams use seed, seed + 1, ...) or one per stream; a stream depends only on its own seed
    stop      tokens that end a stream
    compile   torch.compile the step; None: only if the run is long enough to pay for it
    lanes     parts of the batch whose kernels overlap on a GPU; None: the fastest number
    told      called after each token, with the number of tokens so far

    A state has not seen the last token that was drawn. To continue, pass that token again as the prompt:

    first = model.generate(prompt, 10, full=True)
    more = model.generate(first.tokens[:, -1:], 10, state=first.state)
    """
    check_count("steps", steps)
    drawing = check_drawing(model, Sampling.of(sampling, **options), stop)
    prompts = read_prompts(model, prompt, lengths, state, seed)
    lanes = (2 if len(prompts.tokens) >= LANES_PAY else 1) if lanes is None else lanes
    check_count("lanes", lanes)
    unroll = UNROLL if steps >= 8 * UNROLL else 1
    with evaluating(model, list(model.modules())):
        loop, key = _start(model, prompts, steps, *drawing, compile, logprobs=logprobs, lanes=lanes, unroll=unroll)
        out = torch.empty(steps, len(prompts.tokens), dtype=torch.int64, device=model.device)
        scores = torch.empty(out.shape, device=model.device) if logprobs else None
        made = 0
        for tokens, logs in loop.groups(steps):
            last, made = made, made + len(tokens)
            out[last:made] = tokens
            if scores is not None and logs is not None:
                scores[last:made] = logs
            if told is not None:
                for count in range(last + 1, made + 1):
                    told(count)
            checks = loop.stop is not None and last // CHECK < made // CHECK and made < steps
            if checks and bool(loop.done.all()):
                out[made:] = tokens[-1]
                if scores is not None:
                    scores[made:] = 0
                break
        # the steps of later calls write into the state of a loop that is kept, so the caller gets a copy
        after = map_state(torch.clone, loop.state) if full and loop.keepable(model) else loop.state
        loop.park(model, key)
    out = out.T.contiguous()
    if not full:
        return out[0] if prompts.single else out
    ends = torch.full((len(out),), steps, device=out.device)
    if loop.stop is not None:
        hit = (out[..., None] == loop.stop).any(-1)
        ends = torch.where(hit.any(1), hit.int().argmax(1) + 1, ends)
    return Generated(out, ends, None if scores is None else scores.T.contiguous(), after)


@checked
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
    **options: Unpack[SamplingOptions],
) -> Iterator[Any]:
    """The tokens of `generate` one by one: ints for a prompt [T], tensors [B] for prompts [B, T].

    steps     None: until every stream has stopped, or forever
    capacity  with steps=None, the positions for which a growing state has room at first

    Everything else is as in `generate`. Arguments are checked at once; tokens are made on demand.
    """
    for name, count in (("steps", steps), ("capacity", capacity)):
        check_count(name, 1 if count is None else count)
    drawing = check_drawing(model, Sampling.of(sampling, **options), stop)
    prompts = read_prompts(model, prompt, lengths, state, seed)

    def run() -> Iterator[Any]:
        modules = list(model.modules())
        with evaluating(model, modules):
            loop, key = _start(model, prompts, steps, *drawing, compile, capacity)
        made = 0
        while steps is None or made < steps:
            with evaluating(model, modules):  # not between tokens, since the caller may stop iterating
                ((token, _),) = loop.advance(1)
            try:
                yield int(token[0]) if prompts.single else token.clone()
            except GeneratorExit:  # the caller wants no more
                loop.park(model, key)
                raise
            made += 1
            if loop.stop is not None and bool(loop.done.all()):
                break
        loop.park(model, key)

    return run()


class Prompts(NamedTuple):
    """What streams start from, already checked."""

    tokens: Tensor  # [B, T]; a row repeats its first token beyond its length
    lengths: Tensor | None  # [B]; None: every row has T tokens
    seeds: Tensor  # [B]
    state: State | None  # what came before the prompts
    single: bool  # given as one row [T], without a batch

    @property
    def sizes(self) -> Tensor:
        """[B]: tokens in each prompt."""
        return torch.full_like(self.tokens[:, 0], self.tokens.shape[1]) if self.lengths is None else self.lengths

    @property
    def last(self) -> Tensor:
        """[B]: the last token of each prompt."""
        return self.tokens.gather(1, self.sizes[:, None] - 1)[:, 0]


def _start(
    model: Any,
    prompts: Prompts,
    steps: int | None,
    sampling: Sampling,
    stop: Sequence[int],
    compile: bool | None,
    capacity: int | None = None,
    logprobs: bool = False,
    lanes: int = 1,
    unroll: int = 1,
) -> tuple[Loop, Hashable]:
    """The loop after reading the prompts, one that was kept if there is one, and the key to keep it by."""
    before = 0 if prompts.state is None else int(position_of(prompts.state).max())
    room = before + prompts.tokens.shape[1] - 1 + (steps if steps is not None else max(64, capacity or 0))
    batch = len(prompts.tokens)
    check_fits(model, batch, room)
    endless = steps is None and stack_of(model).traits.state == "growing"  # a state that may grow cannot be captured
    keeps = captures(model) and not endless
    if keeps and stack_of(model).traits.state == "growing":
        wider = bucket(room, limit_of(model))
        room = wider if batch <= largest_batch(model, wider) else room
    state = begin(model, prompts, room)
    compile = (steps or 0) >= COMPILE_PAYS if compile is None else compile
    rows = Rows.of([sampling], values_of(model), model.device)
    key = loop_key(state, rows, len(stop), compile, logprobs, lanes, unroll)
    loop: Loop | None = kept.take(model, key, kept.stamp(model)) if keeps else None
    start = state, prompts.last, prompts.seeds
    if loop is None:
        loop = Loop(model, *start, rows, stop, logprobs, compile=compile, lanes=lanes, unroll=unroll)
        loop.capturing = loop.capturing and not endless
    else:
        loop.restart(model, *start, rows, stop)
    loop.mark_seen(prompts.tokens)
    return loop, key


def bucket(room: int, limit: int | None) -> int:
    """Positions to hold for a run of `room`: at most a quarter or 64 more, so that about equal runs are of one kind.

    `limit`: the most that the model has.
    """
    step = max(64, 1 << max(0, room.bit_length() - 3))
    wider = -(-room // step) * step
    return wider if limit is None else max(room, min(wider, limit))


def check_drawing(model: Any, sampling: Sampling, stop: int | Sequence[int]) -> tuple[Sampling, tuple[int, ...]]:
    """The sampling, and the stop tokens as a tuple; fails if the model does not generate or cannot draw them."""
    if not isinstance(model, Model) or not hasattr(model, "generate"):
        accepted = "a LanguageModel, a Seq2Seq, an LSTM, or subquad.hf.Decoder(model) of a decoder of transformers"
        raise ValueError(f"model is a {type(model).__name__}: accepted is {accepted}")
    values = values_of(model)
    sampling.check(values)
    stop = (stop,) if isinstance(stop, int) else tuple(stop)
    if any(not 0 <= token < values for token in stop):
        refuse("stop", stop, f"tokens from 0 to {values - 1}")
    return sampling, stop


def read_prompts(
    model: Any,
    prompt: Prompt,
    lengths: Tensor | None,
    state: State | None,
    seed: Seed,
    name: str = "prompt",
    rooms: Rooms | None = None,
) -> Prompts:
    """Prompts in any form, with their seeds and the state before them; ValueError if the model cannot read them."""
    ranks.refuse("generation", "accepted is to generate after the context, from the state of a prefill")
    if not isinstance(prompt, Tensor):
        check_plain(name, prompt, Prompt)
        if prompt and all(isinstance(row, int) for row in prompt):
            prompt = torch.tensor(prompt)
        else:
            if lengths is not None:
                raise ValueError(f"lengths came with a list of prompts, which have their own: leave it out ({name})")
            if any(isinstance(row, Tensor) and row.ndim != 1 for row in prompt):
                refuse(name, prompt, "a list of rows [T]")
            if not prompt or any(len(row) == 0 for row in prompt):  # type: ignore[arg-type]
                raise ValueError(f"{name} has an empty row: every stream needs a first token, such as a start token")
            parts = [torch.as_tensor(row) for row in prompt]
            lengths = torch.tensor([len(part) for part in parts])
            prompt = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    tokens = prompt[None] if prompt.ndim == 1 else prompt
    if tokens.ndim != 2 or tokens.numel() == 0 or tokens.dtype not in INTEGERS:
        kind = f"{prompt.dtype} {shape_of(prompt)}"
        raise ValueError(f"{name} is {kind}: accepted are integers [B, T] or [T], at least one per stream")
    if tokens.device.type == "meta" and model.device.type != "meta":
        raise ValueError(f"{name} is on meta and has no values: accepted are tokens on a device that holds them")
    check_strided(name, tokens)
    lengths = check_lengths(lengths, tokens)
    if lengths is not None and bool((lengths < 1).any()):
        raise ValueError("lengths has a 0: every stream needs a first token, such as a start token")
    if lengths is not None and bool((lengths == tokens.shape[1]).all()):
        lengths = None
    if lengths is not None:
        tokens = torch.where(torch.arange(tokens.shape[1]) < lengths[:, None], tokens, tokens[:, :1])
        lengths = lengths.to(model.device)
    tokens = tokens.to(model.device, torch.int64)
    check_ids(name, tokens, vocab_of(model))
    seeds = make_seeds(seed, len(tokens), tokens.device)
    if state is not None:
        _check_given_state(model, state, len(tokens), rooms or Rooms(decoder_of(model)))
    return Prompts(tokens, lengths, seeds, state, prompt.ndim == 1)


def _check_given_state(model: Any, state: State, batch: int, rooms: Rooms) -> None:
    """Refuse the state of another model or of another batch."""
    check_state(state)
    wanted = rooms.shape(1)
    names, accepted = ([name for name, _ in leaves(nest)] for nest in (state, wanted))
    if type(state) is not type(wanted) or names != accepted:
        raise ValueError(
            f"state is a {type(state).__name__} of {', '.join(names[:3])}, ...: accepted is a state of this model's "
            f"init_state, prefill or generate, a {type(wanted).__name__} of {', '.join(accepted[:3])}, ..."
        )
    if position_of(state).device != model.device:
        raise ValueError(f"state is on {position_of(state).device}: this model is on {model.device}")
    if batch_of(state) != batch:
        raise ValueError(f"state has batch {batch_of(state)}: prompt has batch {batch}; fork makes one into many")


def begin(model: Any, prompts: Prompts, capacity: int, rooms: Rooms | None = None) -> State:
    """A new state after all but the last token of each prompt, with room for `capacity` positions."""
    decoder, (batch, longest), state = decoder_of(model), prompts.tokens.shape, prompts.state
    rooms = Rooms(decoder) if rooms is None else rooms
    if state is None and hasattr(model, "encode"):
        raise ValueError("state=None cannot work: a model that reads a source starts from init_state(*encode(source))")
    count = longest - 1
    if state is not None:
        state = rooms.fit(map_state(torch.clone, state), capacity)
    elif count == 0:
        state = decoder.init_state(batch, capacity)
    piece = max(1, _numbers(model) // batch)
    with torch.no_grad():
        for start in range(0, count, piece):
            part = prompts.tokens[:, start : min(start + piece, count)]
            left = None if prompts.lengths is None else (prompts.lengths - 1 - start).clamp(0, part.shape[1])
            # from None, not from an empty state: it tells a mechanism that nothing came before
            work = work_of(model, () if state is None else state, part.numel())
            _, after = run_small(work, functools.partial(decoder.prefill, part, lengths=left, state=state, head=False))
            state = after if state is not None else rooms.fit(after, capacity)
    return map_state(lambda tensor: tensor.contiguous(), state)


def _numbers(model: Any) -> int:
    """Tokens of a prompt to read at once. It does not depend on what is free, so that a prompt is read as before."""
    config = stack_of(model).config
    widest = 4 * max(config.dim, getattr(config, "ff_width", 0))
    if decoder_of(model) is not model:
        widest += values_of(model)  # whole outputs
    if model.device.type != "cuda":
        return PIECE // widest
    return torch.cuda.get_device_properties(model.device).total_memory // PART // widest


class _Modes(NamedTuple):
    users: set[object]  # one for each call that generates with the model now
    training: list[nn.Module]  # the modules that were in training before the first of them


_lock = threading.Lock()
_modes: dict[int, _Modes] = {}  # by the id of a model


@contextmanager
def evaluating(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Turn dropout off. The modules return to their own modes once no other call generates with the model."""
    user = object()
    try:
        with _lock:
            modes = _modes.setdefault(id(model), _Modes(set(), [module for module in modules if module.training]))
            modes.users.add(user)
            for module in modes.training:
                module.training = False
        yield
    finally:
        try:
            _restore_modes(model, user)
        except KeyboardInterrupt:  # while restoring: try again
            _restore_modes(model, user)
            raise


def _restore_modes(model: nn.Module, user: object) -> None:
    with _lock:
        modes = _modes.get(id(model), _Modes(set(), []))
        modes.users.discard(user)
        if not modes.users:
            for module in modes.training:
                module.training = True
            _modes.pop(id(model), None)
