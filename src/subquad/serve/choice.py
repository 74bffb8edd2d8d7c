"""The text of one choice as its tokens come: whole characters only, and nothing that may become a stop text."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from subquad.serve.request import Drawn
from subquad.serve.vocabulary import Vocabulary

LEAST_LOGPROB = -9999.0  # OpenAI's number for "very improbable", where ours is -infinity


class Piece(NamedTuple):
    """New text, the tokens that it ends, and at which character each of them begins."""

    text: str
    drawn: Sequence[Drawn]
    offsets: Sequence[int]


class Choice:
    __slots__ = ("decoder", "ends", "finish", "given", "held", "index", "made", "stop", "waiting", "written")

    def __init__(self, index: int, vocabulary: Vocabulary, stop: tuple[str, ...], ends: tuple[int, ...]):
        self.index, self.stop, self.ends = index, stop, frozenset(ends)
        self.decoder = vocabulary.decoder()
        self.held = ""  # text that is not given yet
        self.waiting: deque[tuple[Drawn, int, int]] = deque()  # tokens of it, with begin and end in the whole text
        self.written = self.given = 0  # characters that were decoded, and that were given
        self.made = 0  # tokens drawn, including those of a stop text
        self.finish: str | None = None  # "stop" or "length" at the end

    def push(self, drawn: Sequence[Drawn], end: str | None) -> bool:
        """Take new tokens; True if a stop text came, so that the engine need not go on."""
        for one in drawn:
            self.made += 1
            self._add(one, "" if one.token in self.ends else self.decoder.push(one.token))
            if self.stop and self._stopped():
                return True
        if end is not None:
            self._add(None, self.decoder.flush())
            if not (self.stop and self._stopped()):
                self.finish = end
        return False

    def quick(self, drawn: Sequence[Drawn]) -> str:
        """The text of `push` and `take` where there is no stop text, no end and no log-probability."""
        push = self.decoder.push
        text = push(drawn[0].token) if len(drawn) == 1 else "".join([push(one.token) for one in drawn])
        self.made += len(drawn)
        return text

    def take(self) -> Piece | None:
        """What may be given now; None if nothing."""
        keep = 0 if self.finish is not None or not self.stop else self._may_stop()
        text = self.held[: len(self.held) - keep]
        self.held = self.held[len(text) :]
        self.given += len(text)
        count = 0
        for number, (_, begin, end) in enumerate(self.waiting, 1):
            if end > self.given:
                break
            if begin < end or self.finish is not None or not self.stop:
                count = number  # a part of a character goes with the whole, which may belong to a stop text
        ended = [self.waiting.popleft() for _ in range(count)]
        drawn, offsets = [one for one, _, _ in ended], [begin for _, begin, _ in ended]
        return Piece(text, drawn, offsets) if text or drawn else None

    def _add(self, one: Drawn | None, text: str) -> None:
        begin = self.written
        self.written += len(text)
        self.held += text
        if one is not None:
            self.waiting.append((one, begin, self.written))
        elif text and self.waiting:  # what a flush wrote belongs to the last token
            last, begin, _ = self.waiting.pop()
            self.waiting.append((last, begin, self.written))

    def _stopped(self) -> bool:
        """Whether a stop text is complete. Then the text ends before it, with the tokens that begin before it."""
        found = [place for text in self.stop if (place := self.held.find(text)) >= 0]
        if not found:
            return False
        self.held = self.held[: min(found)]
        end = self.given + len(self.held)
        self.waiting = deque((one, begin, min(after, end)) for one, begin, after in self.waiting if begin < end)
        self.finish = "stop"
        return True

    def _may_stop(self) -> int:
        """How many of the last characters may be the beginning of a stop text."""
        for length in range(min(len(self.held), max(map(len, self.stop)) - 1), 0, -1):
            tail = self.held[-length:]
            if any(text.startswith(tail) for text in self.stop):
                return length
        return 0


def completion_logprobs(piece: Piece, vocabulary: Vocabulary, shift: int = 0) -> dict[str, Any]:
    """Log-probabilities as /v1/completions gives them; `shift`: characters before the piece's text."""
    return {
        "tokens": [vocabulary.name_of(one.token) for one in piece.drawn],
        "token_logprobs": [_finite(one.logprob) for one in piece.drawn],
        "top_logprobs": [
            None
            if one.logprob is None
            else {vocabulary.name_of(token): _finite(value) for token, value in (*one.top, (one.token, one.logprob))}
            for one in piece.drawn
        ],
        "text_offset": [shift + offset for offset in piece.offsets],
    }


def chat_logprobs(piece: Piece, vocabulary: Vocabulary) -> dict[str, Any]:
    """Log-probabilities as /v1/chat/completions gives them."""

    def about(token: int, logprob: float | None) -> dict[str, Any]:
        written = vocabulary.bytes_of(token)
        return {"token": vocabulary.name_of(token), "logprob": _finite(logprob), "bytes": list(written)}

    content = [
        {**about(one.token, one.logprob), "top_logprobs": [about(*other) for other in one.top]} for one in piece.drawn
    ]
    return {"content": content, "refusal": None}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
