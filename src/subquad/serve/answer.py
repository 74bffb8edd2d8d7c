"""One answer: events of a stream as they come, or one JSON object at the end."""

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

from starlette.types import Receive, Scope, Send

from subquad.serve.body import Asked, Refused
from subquad.serve.choice import Choice, Piece, chat_logprobs, completion_logprobs
from subquad.serve.exchange import Job
from subquad.serve.request import Drawn, Request, Update
from subquad.serve.vocabulary import Vocabulary

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies must not collect events


def to_json(value: Any) -> bytes:
    """In ASCII, so that texts that are not Unicode can be told too."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def requests_of(asked: Asked, owner: str) -> list[Request]:
    """What the engine is asked for: prompt after prompt, `n` choices each, every one with its own seed."""
    prompts = [prompt for prompt in asked.prompts for _ in range(asked.n)]
    return [
        Request(
            prompt=prompt, steps=max(1, asked.steps), sampling=asked.sampling, seed=asked.seed + number,
            stop=asked.ends, logprobs=asked.logprobs, owner=owner,
            prompt_logprobs=bool(asked.echoed) and asked.logprobs is not None,
        )
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip


class Answer:
    """A response of Starlette, that is, an ASGI application. `ended` is called once, with the status."""

    def __init__(
        self, asked: Asked, job: Job, vocabulary: Vocabulary, model: str, ended: Callable[["Answer", int], None]
    ):
        self.asked, self.job, self.vocabulary, self.model, self.ended = asked, job, vocabulary, model, ended
        size = len(asked.prompts) * asked.n
        self.choices = [Choice(number, vocabulary, asked.stop, asked.ends) for number in range(size)]
        self.cached = [0] * size
        self.echo: list[Piece | None] = [None] * size  # the prompt, where it is part of the answer
        self.plain = not (asked.stop or asked.echoed) and asked.logprobs is None
        self.open = size  # choices that have not ended
        self.id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.sending: float | None = None  # since when the client has not taken what was sent
        self.task: asyncio.Task[Any] | None = None
        self.started = False
        self.failure: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        self.task = asyncio.current_task()
        watch = asyncio.create_task(self._watch(receive))
        status = 499  # as proxies log it: the client has left
        try:
            work = self._stream(send) if self.asked.stream else self._whole(send)
            status = await asyncio.create_task(work)  # waking a task of its own does not go through Starlette's frames
        except asyncio.CancelledError:
            if not self.job.gone:
                raise
        except Exception as error:  # a mistake of ours: tell it without what was asked
            self.failure, status = error, 500
            content = Refused(500, "the server failed; its log says where").content()
            if self.started:
                await self._body(send, b"data: " + to_json(content) + b"\n\n", more=False)
            else:
                await self._send_json(send, 500, content)
        finally:
            watch.cancel()
            self.job.cancel()
            self.ended(self, status)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.job.leave("the client has left")

    async def _whole(self, send: Send) -> int:
        pieces: list[list[Piece]] = [[] for _ in self.choices]
        try:
            while self.open:
                await self.job.wait()
                if self.job.gone:
                    return 499
                for number, update in self.job.take():
                    pieces[number] += self._push(number, update)
        except Refused as refused:
            return await self._send_json(send, refused.status, refused.content())
        return await self._send_json(send, 200, self._object(pieces))

    async def _stream(self, send: Send) -> int:
        await self.job.wait()  # before the first event an error still has a status
        headers = {"content-type": "text/event-stream; charset=utf-8", **HEADERS}
        first = self.job.inbox[0][1] if self.job.inbox else None
        if first is not None and first.end in ("error", "cancelled"):
            refused = _failed(first)
            return await self._send_json(send, refused.status, refused.content())
        await self._start(send, 200, headers)
        usage = ',"usage":null' if self.asked.usage else ""
        head = "data: " + to_json(self._head())[:-1].decode() + ',"choices":['
        tail = f"]{usage}}}\n\n"
        roles = [f"{head}{self._role(choice)}{tail}" for choice in self.choices if self.asked.chat]
        status = 200
        while self.open:
            await self.job.wait()
            if self.job.gone:
                return 499
            events, roles = roles, []
            try:
                for number, pieces in self._joined(self.job.take()):
                    if pieces or self.choices[number].finish is not None:
                        events.append(f"{head}{self._delta(number, pieces)}{tail}")
            except Refused as refused:
                events.append(f"data: {to_json(refused.content()).decode()}\n\n")
                status, self.open = refused.status, 0
            if not self.open and status == 200 and self.asked.usage:
                events.append(f'{head}],"usage":{to_json(self.usage()).decode()}}}\n\n')
            if not self.open:
                events.append("data: [DONE]\n\n")
            if events:
                await self._body(send, "".join(events).encode(), more=bool(self.open))
        return status

    def _joined(self, inbox: list[tuple[int, Update]]) -> Iterable[tuple[int, list[Piece]]]:
        """Choices and what may be given of each."""
        if len(inbox) == 1:
            ((number, update),) = inbox
            return ((number, self._push(number, update)),)
        joined: dict[int, list[Piece]] = {}
        for number, update in inbox:
            joined.setdefault(number, []).extend(self._push(number, update))
        return joined.items()

    def _push(self, number: int, update: Update) -> list[Piece]:
        """What may be given of a choice after an update."""
        choice = self.choices[number]
        if self.plain and update.end is None and update.drawn:
            return [choice.quick(update.drawn)]
        if choice.finish is not None:
            return []
        if update.end in ("error", "cancelled"):
            raise _failed(update)
        pieces = []
        self.cached[number] = max(self.cached[number], update.cached)
        if self.asked.echoed and self.echo[number] is None and (update.prompt or update.drawn or update.end):
            pieces.append(self._echo(number, update.prompt))
        if choice.push(update.drawn if self.asked.steps else (), update.end):
            self.job.end(number)  # a stop text came: the engine knows only tokens
        self.open -= choice.finish is not None
        return [*pieces, piece] if (piece := choice.take()) else pieces

    def _echo(self, number: int, drawn: tuple[Drawn, ...]) -> Piece:
        """The prompt as a piece of the answer, with its tokens' log-probabilities if they were asked for."""
        prompt = self.asked.prompts[number // self.asked.n]
        whole = Choice(number, self.vocabulary, (), ())
        whole.push(drawn or [Drawn(token) for token in prompt], "length")
        piece = whole.take() or Piece("", [], [])
        self.echo[number] = piece
        return piece

    def _head(self) -> dict[str, Any]:
        kind = "text_completion" if not self.asked.chat else "chat.completion"
        kind += ".chunk" if self.asked.chat and self.asked.stream else ""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _role(self, choice: Choice) -> str:
        delta = {"role": "assistant", "content": ""}
        return to_json({"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}).decode()

    def _delta(self, number: int, pieces: list[Piece]) -> str:
        """One choice in an event; written by hand, because it is written for every token."""
        if len(pieces) == 1 and self.plain:
            (piece,) = pieces
            written, drawn = piece.text, piece.drawn
        else:
            written, drawn = "".join([piece.text for piece in pieces]), self._new(pieces, number)
        text = json.dumps(written)
        tokens = str(drawn[0].token) if len(drawn) == 1 else ",".join([str(one.token) for one in drawn])
        finish = self.choices[number].finish
        said = "null" if finish is None else f'"{finish}"'
        what = f'"delta":{{"content":{text}}}' if self.asked.chat else f'"text":{text}'
        logprobs = "null" if self.asked.logprobs is None else to_json(self._logprobs(number, pieces)).decode()
        return f'{{"index":{number},{what},"logprobs":{logprobs},"finish_reason":{said},"tokens":[{tokens}]}}'

    def _object(self, pieces: list[list[Piece]]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for number, parts in enumerate(pieces):
            text = "".join(piece.text for piece in parts)
            message = {"role": "assistant", "content": text, "refusal": None}
            choices.append({
                "index": number,
                **({"message": message} if self.asked.chat else {"text": text}),
                "logprobs": None if self.asked.logprobs is None else self._logprobs(number, parts),
                "finish_reason": self.choices[number].finish,
                "tokens": [one.token for one in self._new(parts, number)],
            })  # fmt: skip
        return {**self._head(), "choices": choices, "usage": self.usage()}

    def _new(self, pieces: list[Piece], number: int) -> list[Drawn]:
        """The tokens that were drawn, without those of the prompt."""
        return list(itertools.chain(*(piece.drawn for piece in pieces if piece is not self.echo[number])))

    def _logprobs(self, number: int, pieces: list[Piece]) -> dict[str, Any]:
        if self.asked.chat:
            text, drawn = "".join(p.text for p in pieces), [one for p in pieces for one in p.drawn]
            return chat_logprobs(Piece(text, drawn, []), self.vocabulary)
        echo = self.echo[number]
        shift = len(echo.text) if echo is not None else 0
        parts = [completion_logprobs(p, self.vocabulary, 0 if p is echo else shift) for p in pieces]
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [value for part in parts for value in part[name]] for name in names}

    def usage(self) -> dict[str, Any]:
        read = sum(map(len, self.asked.prompts))
        made = sum(choice.made for choice in self.choices)
        cached = sum(self.cached[:: self.asked.n])
        return {
            "prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip

    async def _send_json(self, send: Send, status: int, content: dict[str, Any]) -> int:
        data = to_json(content)
        await self._start(send, status, {"content-type": "application/json", "content-length": str(len(data))})
        await self._body(send, data, more=False)
        return status

    async def _start(self, send: Send, status: int, headers: dict[str, str]) -> None:
        raw = [(name.encode(), value.encode()) for name, value in {**headers, "x-request-id": self.id}.items()]
        self.started = True
        await send({"type": "http.response.start", "status": status, "headers": raw})

    async def _body(self, send: Send, data: bytes, more: bool) -> None:
        self.sending = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self.sending = None


def _failed(update: Update) -> Refused:
    if update.end == "cancelled":
        return Refused(503, "the server is shutting down, and cancelled this request", code="cancelled")
    return Refused(500, f"the engine failed: {update.error}", code="engine_error")
