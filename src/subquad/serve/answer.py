"""One answer: events of a stream as they come, or one JSON object at the end."""

import asyncio
import hashlib
import itertools
import json
import secrets
import time
import types
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from subquad.serve.body import Asked, Refused
from subquad.serve.choice import Choice, Piece, chat_logprobs, completion_logprobs
from subquad.serve.exchange import Job
from subquad.serve.request import Drawn, Request, Update
from subquad.serve.vocabulary import Vocabulary

DIRECT = "subquad.send"  # in a scope: the connection's own `send`, without what is wrapped around it for headers
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies must not collect events


_quoted = json.encoder.encode_basestring_ascii  # of text, quicker than json.dumps


def to_json(value: Any) -> bytes:
    """In ASCII, so that texts that are not Unicode can be told too."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def requests_of(asked: Asked, owner: str) -> list[Request]:
    """What the engine is asked for: prompt after prompt, `n` choices each, every one with its own seed."""
    prompts = [prompt for prompt in asked.prompts for _ in range(asked.n)]
    return [
        Request(
            prompt=prompt, steps=max(1, asked.steps), sampling=asked.sampling, seed=seed_of(asked.seed, number),
            stop=asked.ends, logprobs=asked.logprobs, owner=owner,
            prompt_logprobs=bool(asked.echoed) and asked.logprobs is not None,
        )
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip


def seed_of(seed: int, number: int) -> int:
    """The seed of a choice: the first one has the request's, the others have a hash of it and their number.

    So choices are not those of another seed, as they would be with seed + number.
    """
    if number == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()) >> 2


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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.task = asyncio.current_task()
        watch = asyncio.create_task(self._watch(receive))
        status = 499  # as proxies log it: the client has left
        try:
            status = await (self._stream(send, scope.get(DIRECT, send)) if self.asked.stream else self._whole(send))
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
                    pieces[number] += self.push(number, update)
        except Refused as refused:
            return await self._send_json(send, refused.status, refused.content())
        return await self._send_json(send, 200, self._object(pieces))

    async def _stream(self, send: Send, direct: Send) -> int:
        await self.job.wait()  # before the first event an error still has a status
        headers = {"content-type": "text/event-stream; charset=utf-8", **HEADERS}
        first = self.job.inbox[0][1] if self.job.inbox else None
        if first is not None and first.end in ("error", "cancelled"):
            refused = _failed(first)
            return await self._send_json(send, refused.status, refused.content())
        await self._start(send, 200, headers)
        self.job.writer = writer = Events(self, direct)
        try:
            writer.write()
            return await writer.done
        finally:
            self.job.writer = None
            if writer.rest is not None:
                writer.rest.cancel()

    def push(self, number: int, update: Update) -> list[Piece]:
        """What may be given of a choice after an update."""
        choice = self.choices[number]
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
        prompt = number // self.asked.n
        if drawn and not self.asked.begun[prompt]:
            whole = Choice(number, self.vocabulary, (), ())
            whole.push(drawn, "length")
            piece = whole.take() or Piece("", [], [])
        else:
            piece = Piece(self.asked.echoed[prompt], [], [])
        self.echo[number] = piece
        return piece

    def head(self) -> dict[str, Any]:
        kind = "text_completion" if not self.asked.chat else "chat.completion"
        kind += ".chunk" if self.asked.chat and self.asked.stream else ""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _object(self, pieces: list[list[Piece]]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for number, parts in enumerate(pieces):
            text = "".join(piece.text for piece in parts)
            message = {"role": "assistant", "content": text, "refusal": None}
            choices.append({
                "index": number,
                **({"message": message} if self.asked.chat else {"text": text}),
                "logprobs": None if self.asked.logprobs is None else self.logprobs(number, parts),
                "finish_reason": self.choices[number].finish,
                "tokens": [one.token for one in self.new(parts, number)],
            })  # fmt: skip
        return {**self.head(), "choices": choices, "usage": self.usage()}

    def new(self, pieces: list[Piece], number: int) -> list[Drawn]:
        """The tokens that were drawn, without those of the prompt."""
        return list(itertools.chain(*(piece.drawn for piece in pieces if piece is not self.echo[number])))

    def logprobs(self, number: int, pieces: list[Piece]) -> dict[str, Any]:
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


class Events:
    """Writes an answer as server-sent events.

    For almost every token there is an event, so it costs little: it is put together from ready parts, and given to the
    connection in the call that brought the token, with no task to wake. Only where a client does not take it at once a
    task waits until it does, while what comes next gathers in the job's inbox.
    """

    __slots__ = (
        "answer", "begin", "begins", "between", "choices", "data", "done", "end", "ends", "head", "job", "more",
        "opening", "plain", "rest", "send", "status", "tail",
    )  # fmt: skip

    def __init__(self, answer: Answer, send: Send):
        self.answer, self.job, self.send = answer, answer.job, send
        self.choices, self.plain = answer.choices, answer.plain
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()  # the status
        self.status = 200
        self.data, self.more = b"", True  # what is sent next, and whether more will follow
        self.rest: asyncio.Task[None] | None = None  # of a part that the client did not take at once
        asked = answer.asked
        usage = ',"usage":null' if asked.usage else ""
        self.head = "data: " + to_json(answer.head())[:-1].decode() + ',"choices":['
        self.tail = f"]{usage}}}\n\n"
        self.opening = "".join(self._role(choice) for choice in answer.choices if asked.chat)
        self.begin, self.end = ('"delta":{"content":', "}") if asked.chat else ('"text":', "")
        self.between = f'{self.end},"logprobs":null,"finish_reason":null,"tokens":['
        self.begins = [f'{self.head}{{"index":{choice.index},{self.begin}' for choice in answer.choices]
        self.ends = f"]}}{self.tail}"

    def prepare(self) -> None:
        """Make events of what came, unless the client has not yet taken what was sent before."""
        if self.rest is None and not self.data and self.job.inbox:
            try:
                self.data = self._events(self.job.take()).encode()
            except Exception as error:
                self._finish(error)

    def write(self) -> None:
        """Send what came."""
        self.prepare()
        if self.job.gone:
            self._finish(499)
        elif self.data:
            message = {"type": "http.response.body", "body": self.data, "more_body": self.more}
            self.data = b""
            try:
                steps = self.send(message).__await__()
                waits = next(steps)
            except StopIteration:
                if not self.more:
                    self._finish(self.status)
            except Exception as error:
                self._finish(error)
            else:
                self.answer.sending = time.monotonic()
                self.rest = asyncio.ensure_future(_continued(steps, waits))
                self.rest.add_done_callback(self._taken)

    def _taken(self, rest: asyncio.Task[None]) -> None:
        if rest.cancelled():
            return
        self.answer.sending = self.rest = None
        if (error := rest.exception()) is not None:
            self._finish(error)
        elif not self.more:
            self._finish(self.status)
        else:
            self.write()

    def _finish(self, how: int | BaseException) -> None:
        self.job.writer = None
        if self.done.done():
            return
        if isinstance(how, BaseException):
            self.done.set_exception(how)
        else:
            self.done.set_result(how)

    def _events(self, inbox: list[tuple[int, Update]]) -> str:
        answer = self.answer
        if self.plain and not self.job.ended:  # almost always
            events = self._quick(inbox)
        else:
            try:
                events = "".join(self._joined(inbox))
            except Refused as refused:
                events = f"data: {to_json(refused.content()).decode()}\n\n"
                self.status, answer.open = refused.status, 0
            self.more = bool(answer.open)
        if self.opening:
            events, self.opening = self.opening + events, ""
        if self.more:
            return events
        if self.status == 200 and answer.asked.usage:
            events += f'{self.head}],"usage":{to_json(answer.usage()).decode()}}}\n\n'
        return f"{events}data: [DONE]\n\n"

    def _quick(self, inbox: list[tuple[int, Update]]) -> str:
        """What `_joined` gives for updates that hold nothing but new tokens."""
        if len(inbox) == 1:
            number, update = inbox[0]
            return self._tokens(number, update.drawn)
        joined: dict[int, list[Drawn]] = {}
        for number, update in inbox:
            joined.setdefault(number, []).extend(update.drawn)
        return "".join([self._tokens(number, drawn) for number, drawn in joined.items()])

    def _tokens(self, number: int, drawn: Sequence[Drawn]) -> str:
        text = _quoted(self.choices[number].quick(drawn))
        tokens = drawn[0].token if len(drawn) == 1 else ",".join([str(one.token) for one in drawn])
        return f"{self.begins[number]}{text}{self.between}{tokens}{self.ends}"

    def _joined(self, inbox: list[tuple[int, Update]]) -> Iterable[str]:
        """One event for each choice of which something can be given."""
        answer = self.answer
        joined: dict[int, list[Piece]] = {}
        for number, update in inbox:
            joined.setdefault(number, []).extend(answer.push(number, update))
        for number, pieces in joined.items():
            if pieces or answer.choices[number].finish is not None:
                yield self._event(number, pieces)

    def _event(self, number: int, pieces: list[Piece]) -> str:
        answer, finish = self.answer, self.answer.choices[number].finish
        text = _quoted("".join([piece.text for piece in pieces]))
        tokens = ",".join([str(one.token) for one in answer.new(pieces, number)])
        logprobs = "null" if answer.asked.logprobs is None else to_json(answer.logprobs(number, pieces)).decode()
        reason = "null" if finish is None else f'"{finish}"'
        what = f'{text}{self.end},"logprobs":{logprobs},"finish_reason":{reason},"tokens":[{tokens}'
        return f"{self.begins[number]}{what}{self.ends}"

    def _role(self, choice: Choice) -> str:
        delta = {"role": "assistant", "content": ""}
        first = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return f"{self.head}{to_json(first).decode()}{self.tail}"


@types.coroutine
def _continued(steps: Generator[Any, None, Any], waits: Any) -> Generator[Any, None, None]:
    """The rest of a coroutine that was begun without a task, and waits."""
    try:
        yield waits
    except BaseException:
        steps.close()
        raise
    yield from steps


def _failed(update: Update) -> Refused:
    if update.end == "cancelled":
        return Refused(503, "the server is shutting down, and cancelled this request", code="cancelled")
    return Refused(500, f"the engine failed: {update.error}", code="engine_error")
