"""A stack of blocks over vectors. Models use it as an encoder, a decoder, or a decoder with a memory."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from subquad import ranks
from subquad.checks import INTEGERS, check_count, check_strided, shown
from subquad.mechanisms.base import Mixer, StateKind, Traits
from subquad.models import reversible
from subquad.models.blocks import Block, Stream, Waiting, add_and_norm, make_norm, paired, settled, shorten
from subquad.models.config import TransformerConfig, assemble
from subquad.models.inputs import batch_size, check_position, check_type, clean_frames, length_of
from subquad.models.saving import Model
from subquad.ops.layer_norm import fuses
from subquad.ops.lengths import check_lengths, shape_of, zero_padding
from subquad.ops.precision import wide, wide_type
from subquad.ops.rotary import Turns
from subquad.ops.rotary import turns as make_turns

Embed = Callable[[Tensor, Tensor | None], Tensor]  # (tokens, lengths) -> x [B, T, D]


class State(NamedTuple):
    """The states of the layers' mixers, and how many tokens each row has seen."""

    layers: tuple[Any, ...]
    position: Tensor  # [B]


def joint_state(kinds: Sequence[StateKind | None]) -> StateKind | None:
    """What the states of several layers are together: the kind that grows most, or None if a layer has none."""
    if None in kinds:
        return None
    if "growing" in kinds:
        return "growing"
    return "window" if "window" in kinds else "constant"


class Transformer(Model):
    """Transformer(dim=256, depth=6, heads=8, mechanism="linear", causal=True): x [B, T, D] -> y [B, T, D].

    `mechanism` is a name, a (name, options) pair or a sequence of those cycled over the depth; see TransformerConfig
    for every other keyword. With `cross` each block also attends to a `memory`.
    """

    config_type = TransformerConfig
    config: TransformerConfig

    def __init__(self, config: TransformerConfig | None = None, **fields: Any):
        super().__init__()
        self.config = config = assemble(TransformerConfig, config, fields)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.depth))
        first: dict[type[Mixer], Mixer] = {}
        for block in self._blocks():
            block.mixer.share_with(first.setdefault(type(block.mixer), block.mixer))
        if config.rotary and not any(block.mixer.options.rotary for block in self._blocks()):
            names = ", ".join(sorted({spec.name for spec in config.mechanism}))
            raise ValueError(f"rotary=True cannot work: none of the mechanisms ({names}) knows rotary positions")
        self.norm = make_norm(config) if config.final_norm else nn.Identity()
        # how blocks run in training, if not plainly: a function like torch's checkpoint
        self.recompute: Callable[..., Tensor] | None = None
        if config.checkpoint:
            self.recompute = functools.partial(checkpoint, use_reentrant=False)
        if config.norm_position == "pre":
            self._shrink_outputs()

    @property
    def traits(self) -> Traits:
        """The traits of the whole stack. Its state is of the kind that grows most, or None if a layer has none."""
        return Traits(
            causal=self.config.causal,
            bidirectional=not self.config.causal,
            cross=self.config.cross is not None,
            state=joint_state([block.mixer.traits.state for block in self._blocks()]),
            fixed_length=any(block.mixer.traits.fixed_length for block in self._blocks()),
        )

    def forward(
        self,
        x: Tensor,
        lengths: Tensor | None = None,
        memory: Tensor | None = None,
        memory_lengths: Tensor | None = None,
        embed: Embed | None = None,
        products: bool = False,
    ) -> Tensor:
        """x [B, T, D] -> [B, T', D], where T' = T unless layers pool; zeros beyond `short_lengths(lengths)`.

        With `embed`, x is embed(x, lengths); where blocks are computed again in backward, this is too, and not kept.
        `products`: only products with weights read the result, so that under autocast it may be of their type.
        """
        again = self.recompute is not None and torch.is_grad_enabled() and not self.config.reversible
        if embed is not None and not (again and isinstance(x, Tensor) and x.ndim == 2):  # else it refuses x
            x, embed = embed(x, lengths), None
        x = x if embed is not None else clean_frames(x, self._weight(), lengths, "x")
        lengths = check_lengths(lengths, x)
        memory_lengths = self._check_memory(memory, memory_lengths, batch_size(x))
        self._check_split(memory)
        with ranks.laid_out(length_of(x)):
            if again:
                stream, lengths = self._run_again(x, lengths, memory, memory_lengths, embed)
            else:
                stream, lengths = self._run(x, lengths, memory, memory_lengths)
            return self._close(stream, lengths, products)

    def _run(
        self, x: Tensor, lengths: Tensor | None, memory: Tensor | None, memory_lengths: Tensor | None
    ) -> tuple[Stream, Tensor | None]:
        """The stream after all blocks, and its lengths."""
        stream = self._open(x)
        if self.config.reversible and torch.is_grad_enabled():
            turns = self._turns(x)
            branches = (
                parts
                for block in self._blocks()
                for parts in block.branches(lengths, memory_lengths, turns.get(block.mixer.turn_width))
            )
            return reversible.run(branches, stream, memory), lengths
        turns = self._turns(x)
        for block in self._blocks():
            stream = block(stream, lengths, memory, memory_lengths, turns.get(block.mixer.turn_width))
            if block.pool > 1:
                lengths, turns = shorten(lengths, block.pool), self._turns(stream[0])
        return stream, lengths

    def _run_again(
        self,
        x: Tensor,
        lengths: Tensor | None,
        memory: Tensor | None,
        memory_lengths: Tensor | None,
        embed: Embed | None,
    ) -> tuple[Stream, Tensor | None]:
        """`_run`, where blocks are computed again in backward."""
        assert self.recompute is not None
        turns = self._turns(x)
        for group in self._groups():
            given = (group, x, lengths, memory, memory_lengths, turns, embed)
            if len(group) == 1:
                x = self._recomputed(*given)
            else:
                x = self.recompute(self._recomputed, *given, **ranks.recomputing())
            embed = None
            for block in group:
                lengths = shorten(lengths, block.pool)
            if any(block.pool > 1 for block in group):
                turns = self._turns(x)
        return (x,), lengths

    def _recomputed(
        self,
        blocks: Sequence[Block],
        x: Tensor,
        lengths: Tensor | None,
        memory: Tensor | None,
        memory_lengths: Tensor | None,
        turns: dict[int | None, Turns],
        embed: Embed | None,
    ) -> Tensor:
        """The stream after some blocks, each of which is computed again in backward."""
        assert self.recompute is not None
        for block in blocks:
            given = (lengths, memory, memory_lengths, turns.get(block.mixer.turn_width))
            x = self.recompute(self._alone(block, embed), x, *given, **ranks.recomputing())
            embed = None
            if block.pool > 1:
                lengths, turns = shorten(lengths, block.pool), self._turns(x)
        return x

    def _alone(self, block: Block, embed: Embed | None) -> Callable[..., Tensor]:
        """The block from one tensor to one.

        torch keeps what goes into a checkpoint: of a stream with a branch that is yet to be added it would keep both,
        and a tuple even where a checkpoint around it makes it again.
        """

        def run(x: Tensor, lengths: Tensor | None, *given: Any) -> Tensor:
            if embed is not None:
                x = clean_frames(embed(x, lengths), self._weight(), lengths, "x")
            return settled(block((x,), lengths, *given))[0]

        return run

    def _groups(self) -> Iterator[list[Block]]:
        """The blocks, in as many groups as `checkpoint` keeps inputs. Those of a group are computed again together.

        When backward is at a group, the inputs of this and the earlier groups are kept, and those of its other blocks.
        So each group may have one block less than the one before.
        """
        blocks, count = self._blocks(), self.config.inputs_kept
        while blocks:
            size = min(count, len(blocks) - count + 1)
            yield blocks[:size]
            blocks, count = blocks[size:], count - 1

    def short_lengths(self, lengths: Tensor | None) -> Tensor | None:
        """Lengths of the output's rows: those of the input, unless layers pool."""
        if lengths is not None:
            check_strided("lengths", lengths)
            if lengths.ndim != 1 or lengths.dtype not in INTEGERS:
                raise ValueError(f"lengths is {shown(lengths)}: accepted is one integer per row, [B]")
        for block in self._blocks():
            lengths = shorten(lengths, block.pool)
        return lengths

    def init_state(self, batch: int, capacity: int | None = None) -> State:
        """The state before the first token. `capacity`: positions growing states hold without reallocating."""
        self._check_stateful("init_state")
        check_count("batch", batch)
        layers = tuple(block.init_state(batch, capacity) for block in self._blocks())
        return State(layers, torch.zeros(batch, dtype=torch.int64, device=self.device))

    def remember(self, memory: Tensor, memory_lengths: Tensor | None = None) -> tuple[Any, ...]:
        """What each layer's cross-attention keeps of a memory [B, S, D]; `prefill` and `step` accept it as the memory.

        So a decoder projects the memory once, not at every step.
        """
        batch = memory.shape[0] if isinstance(memory, Tensor) and memory.ndim else 0
        memory_lengths = self._check_memory(memory, memory_lengths, batch)
        return tuple(block.remember(memory, memory_lengths) for block in self._blocks())

    def prefill(
        self,
        x: Tensor,
        lengths: Tensor | None = None,
        state: State | None = None,
        memory: Tensor | tuple[Any, ...] | None = None,
        memory_lengths: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Read a prompt [B, T, D] in parallel, after `state` if given: (y, the state after it)."""
        self._check_stateful("prefill")
        x, lengths = clean_frames(x, self._weight(), lengths, "x"), check_lengths(lengths, x)
        batch, size, _ = x.shape
        memories, memory_lengths = self._memories(memory, memory_lengths, batch)
        if state is None:
            position, states = torch.zeros(batch, dtype=torch.int64, device=x.device), (None,) * len(self.blocks)
        else:
            position, states = self.check_state(state, batch)
        self._check_split(memory)
        stream, layers = self._open(x), []
        with ranks.laid_out(size):
            turns = self._turns(x, None if state is None else position)
            for block, before, read in zip(self._blocks(), states, memories, strict=True):
                given = turns.get(block.mixer.turn_width)
                stream, after = block.prefill(stream, lengths, before, read, memory_lengths, given)
                layers.append(after)
            new = position + ranks.tokens_read(size, lengths)
        return self._close(stream, lengths), State(tuple(layers), new)

    def step(
        self,
        x: Tensor,
        state: State,
        memory: Tensor | tuple[Any, ...] | None = None,
        memory_lengths: Tensor | None = None,
        inplace: bool = False,
        norm: bool = True,
    ) -> tuple[Tensor, State]:
        """One token, x [B, D] -> (y [B, D], the new state); `inplace` overwrites the old one.

        norm=False: y before the final norm, for a caller that applies it together with what follows.
        """
        self._check_stateful("step")
        if x.ndim != 2:
            raise ValueError(f"x has shape {shape_of(x)}: step takes one token, [batch, {self.config.dim}]")
        check_type(x, self._weight(), "x")
        check_strided("x", x)
        position, states = self.check_state(state, x.shape[0])
        memories, memory_lengths = self._memories(memory, memory_lengths, x.shape[0])
        stream, layers = self._open(x), []
        turns = self._turns(x[:, None], position)
        late: list[Tensor] = []  # positions that layers leave to be moved here, by one operation for all
        for block, before, read in zip(self._blocks(), states, memories, strict=True):
            given = turns.get(block.mixer.turn_width)
            stream, after = block.step(stream, before, read, memory_lengths, inplace, given, late)
            layers.append(after)
        if inplace:
            torch._foreach_add_([position, *late], 1)
        else:
            position = position + 1
        y = self._close(stream, None) if norm else self._join(settled(stream))
        return y, State(tuple(layers), position)

    def check_state(self, state: State, batch: int) -> tuple[Tensor, tuple[Any, ...]]:
        """(positions, the layers' states) of a state that fits this model and the batch."""
        if not isinstance(state.layers, tuple) or len(state.layers) != len(self.blocks):
            kind = f"{len(state.layers)} layers" if isinstance(state.layers, tuple) else shown(state.layers)
            wanted = f"a state from init_state or prefill, {len(self.blocks)} layers"
            raise ValueError(f"state is a state of {kind}: accepted is {wanted}")
        check_position(state.position, batch, self._weight().device)
        return state.position, state.layers

    def _check_split(self, memory: object) -> None:
        """Refuse what cannot be split over ranks."""
        if memory is not None:
            ranks.refuse("memory", "a memory is not split; accepted is a model without cross-attention")
        if any(block.pool > 1 for block in self._blocks()):
            ranks.refuse(f"pool={self.config.pool}", "accepted is 1")

    def _blocks(self) -> list[Block]:
        return list(self.blocks)  # type: ignore[arg-type]

    def _weight(self) -> Tensor:
        """A weight of the model, for its width, type and device."""
        return self._blocks()[0].ff.inner.weight

    def _turns(self, x: Tensor, position: Tensor | None = None) -> dict[int | None, Turns]:
        """The rotary turns of the tokens x [B, T, D], for each width that mixers turn; rows start at `position` [B]."""
        widths = {block.mixer.turn_width for block in self._blocks()} - {None}
        again = (self.config.checkpoint or self.config.reversible) and torch.is_grad_enabled()
        if not widths or (again and torch.compiler.is_compiling()):
            return {}  # torch cannot compile a function that is run again and that is given them; mixers make their own
        if position is not None and x.shape[1] == 1 and ranks.active() is None:
            at = position[:, None]  # a step
        else:
            at = ranks.positions(x.shape[1], x.device)
            at = at if position is None else position[:, None] + at
        dtype = wide_type(x if x.is_floating_point() else self._weight())  # x may be what is yet to be embedded
        return {width: make_turns(at, width, dtype) for width in widths if width is not None}

    def _open(self, x: Tensor) -> Stream:
        if not self.config.reversible:
            return (x,)
        x = wide(x)  # backward must subtract exactly what was added
        return x, x

    def _join(self, stream: Stream) -> Tensor:
        return ((stream[0] + stream[1]) / 2).to(self.dtype) if len(stream) == 2 else stream[0]

    def _close(self, stream: Stream, lengths: Tensor | None, products: bool = False) -> Tensor:
        norm = self.norm
        if not paired(stream) and not isinstance(norm, nn.Identity) and fuses(stream[0], norm):
            x, added, drop = stream if isinstance(stream, Waiting) else (stream[0], None, None)
            y = add_and_norm(norm, x, added, drop, products=products)[1]
        else:
            y = norm(self._join(settled(stream)))
        return zero_padding(y, lengths)

    def _shrink_outputs(self) -> None:
        """Start with small branch outputs, so that the residual does not grow with depth (GPT-2, §2.3).

        The output projection of a mixer is called `out`, as in Heads and FeedForward.
        """
        branches = [m for block in self._blocks() for m in (block.mixer, block.cross, block.ff) if m is not None]
        for branch in branches:
            names = [name for name, _ in branch.named_modules() if name.rpartition(".")[2] == "out"]
            if names:  # a mixer of mixers also contains those of its parts; its own is the outermost
                outermost = min(names, key=lambda name: name.count("."))
                with torch.no_grad():
                    branch.get_parameter(f"{outermost}.weight").mul_(1 / math.sqrt(len(branches)))

    def _memories(
        self, memory: Tensor | tuple[Any, ...] | None, lengths: Tensor | None, batch: int
    ) -> tuple[tuple[Any, ...], Tensor | None]:
        """The memory of each layer, and its lengths; None for a remembered memory, which has its own."""
        if not isinstance(memory, tuple):
            return (memory,) * len(self.blocks), self._check_memory(memory, lengths, batch)
        if lengths is not None:
            raise ValueError("memory_lengths was given with a remembered memory, which has its own: leave it out")
        count = 0 if self.config.cross is None else len(self.blocks)
        if len(memory) != count:
            raise ValueError(f"memory is remembered by {len(memory)} layers: this model has {count} that read one")
        return memory, None

    def _check_memory(self, memory: Tensor | None, lengths: Tensor | None, batch: int) -> Tensor | None:
        if memory is None and self.config.cross is not None:
            raise ValueError("memory is missing: this model has cross-attention")
        if memory is not None and self.config.cross is None:
            raise ValueError("memory was given: this model has no cross-attention")
        if memory is None:
            if lengths is not None:
                raise ValueError("memory_lengths came without memory: pass both or neither")
            return None
        if not isinstance(memory, Tensor) or memory.ndim != 3 or memory.shape[::2] != (batch, self.config.dim):
            raise ValueError(f"memory has shape {shape_of(memory)}: accepted is [{batch}, S, {self.config.dim}]")
        check_type(memory, self._weight(), "memory")
        check_strided("memory", memory)
        return check_lengths(lengths, memory, "memory_lengths")

    def _check_stateful(self, method: str) -> None:
        if not self.config.causal:
            raise NotImplementedError(f"{method}: this model was built with causal=False, so there is no state")
        for block in self._blocks():
            if block.mixer.traits.state is None:
                raise NotImplementedError(f"{method}: {block.name} has no recurrent form; recompute with forward")
