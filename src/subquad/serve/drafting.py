"""Guess the next tokens of a stream with a smaller model, for `Streams.propose`."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from subquad.checks import refuse, shown
from subquad.models.decoding import decoder_of, head_of, limit_of, position_of, values_of, vocab_of, work_of
from subquad.models.generation import evaluating
from subquad.models.sampling import Rows, Sampling
from subquad.models.state import State
from subquad.models.threads import run_small

PIECE = 512  # tokens that a draft model reads at once while it catches up with a text


class Draft:
    """What a draft model knows of one text."""

    def __init__(self, sampling: Sampling, seed: int):
        self.sampling, self.seed = sampling, seed
        self.read = 0  # tokens of the text that the state has seen
        self.state: State | None = None
        self.rows: Rows | None = None
        self.seeds: torch.Tensor | None = None


class Drafter:
    """A model that guesses. It draws with the sampling and the noise of the text, so that it guesses drawn tokens too.

    A guess leaves the state alone: steps return new states, and the one that has seen the text is kept.
    """

    def __init__(self, model: Any, target: Any):
        if not hasattr(model, "generate") or hasattr(model, "encode"):
            refuse("draft", shown(model), "a language model")
        sizes = [(vocab_of(one), values_of(one)) for one in (model, target)]
        if sizes[0] != sizes[1]:
            refuse(
                "draft", f"a model of {sizes[0][0]} tokens", f"a model of the same {sizes[1][0]} tokens as the other"
            )
        if model.device != target.device:
            refuse("draft", f"a model on {model.device}", f"a model on {target.device}")
        self.model, self.modules = model, list(model.modules())
        self.decoder, self.head, self.limit = decoder_of(model), head_of(model), limit_of(model)

    @torch.no_grad()
    def guess(self, draft: Draft, text: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens after the text; none while the model catches up with a long text."""
        count = count if self.limit is None else min(count, self.limit - len(text) + 1)
        if count < 1:
            return []
        device, sampling = self.model.device, draft.sampling
        if draft.rows is None or draft.seeds is None:
            draft.rows = Rows.of([sampling], self.head.values, device)
            draft.seeds = torch.tensor([draft.seed], dtype=torch.int64, device=device)
        with evaluating(self.model, self.modules):
            missing = torch.tensor(text[draft.read : draft.read + PIECE], dtype=torch.int64, device=device)[None]
            work = work_of(self.model, () if draft.state is None else draft.state, missing.numel())
            outputs, state = run_small(work, functools.partial(self.decoder.prefill, missing, state=draft.state))
            draft.state, draft.read = state, draft.read + missing.shape[1]
            if draft.read < len(text):
                return []
            seen = None
            if sampling.repetition_penalty != 1:
                seen = torch.zeros(1, self.head.values, dtype=torch.bool, device=device)
                seen[0, [token for token in set(text) if token < self.head.values]] = True
            tokens, outputs = [], outputs[:, -1]
            while True:
                token = self.head.draw(outputs, draft.rows, draft.seeds, position_of(state), seen)
                tokens.append(token)
                if len(tokens) == count:
                    return torch.cat(tokens).tolist()
                if seen is not None:
                    seen[0, token] = True
                work = work_of(self.model, state, 1)
                outputs, state = run_small(work, functools.partial(self.decoder.step, token, state))
