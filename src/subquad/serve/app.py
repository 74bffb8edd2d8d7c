"""The HTTP application: routes, keys, limits, errors in OpenAI's form."""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from subquad.checks import shown
from subquad.disk import parse_json
from subquad.serve.answer import DIRECT, Answer, requests_of, to_json
from subquad.serve.body import KNOWN, Asked, Reader, Refused
from subquad.serve.exchange import Exchange, Job
from subquad.serve.metrics import Metrics
from subquad.serve.page import page, policy
from subquad.serve.request import Full
from subquad.serve.request import Request as Choice

T = TypeVar("T")

logger = logging.getLogger("subquad.serve")
LARGE = 1 << 16  # bytes of a body that is read in a thread
MANY = 64  # choices of one that is
PATIENCE = 30.0  # seconds to send a body
STALLED = 60.0  # seconds without reading after which a client is cut off
SAFE = {"cache-control": "no-cache", "referrer-policy": "no-referrer", "x-content-type-options": "nosniff"}
RETRY = "2"  # seconds after which a refused client may try again


@dataclass(kw_only=True)
class Service:
    """One model behind HTTP."""

    reader: Reader
    exchange: Exchange
    metrics: Metrics
    about: Mapping[str, Any]  # the model, as /v1/models shows it
    keys: tuple[str, ...] = ()
    largest: int = 16_000_000  # bytes of a body
    origins: tuple[str, ...] = ()  # that browsers may call from; none: only our own page
    log_prompts: bool = False
    close: Callable[[], None] = lambda: None  # after the engine has stopped
    draining: bool = False
    answers: set[Answer] = field(default_factory=set)

    def app(self) -> ASGIApp:
        cors = Middleware(CORSMiddleware, allow_origins=self.origins, allow_methods=("*",), allow_headers=("*",))
        get, post = ("GET", "HEAD"), ("POST",)
        routed = Starlette(
            routes=[
                Route("/v1/completions", self._guarded(self.complete), methods=post),
                Route("/v1/chat/completions", self._guarded(self.chat), methods=post),
                Route("/v1/models", self._guarded(self.models), methods=get),
                Route("/v1/models/{name:path}", self._guarded(self.model), methods=get),
                Route("/stats", self._guarded(self.stats), methods=get),
                Route("/health", self.health, methods=get),
                Route("/metrics", self.measures, methods=get),
                Route("/", self.home, methods=get),
            ],
            middleware=[cors] if self.origins else [],
            exception_handlers={HTTPException: _http_error, Refused: _refused},
            lifespan=self.lifespan,
        )

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            scope[DIRECT] = send
            try:
                await routed(scope, receive, send)
            finally:
                del scope[DIRECT]  # the connection holds the scope: in a circle both would wait for the collector

        return app

    @contextlib.asynccontextmanager
    async def lifespan(self, _: ASGIApp) -> AsyncIterator[None]:
        self.exchange.loop = asyncio.get_running_loop()
        self.exchange.engine.start()
        sweeper = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            sweeper.cancel()
            await asyncio.to_thread(self.exchange.engine.stop, drain=False)
            await asyncio.to_thread(self.close)

    async def complete(self, request: Request) -> Any:
        return await self._answer(request, self.reader.completion)

    async def chat(self, request: Request) -> Any:
        return await self._answer(request, self.reader.chat)

    async def models(self, request: Request) -> Response:  # noqa: ARG002
        return _json({"object": "list", "data": [self.about]})

    async def model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) != self.about["id"]:
            message = f"model={shown(name)} does not exist: this server has {shown(self.about['id'])}"
            raise Refused(404, message, param="model", code="model_not_found")
        return _json(self.about)

    async def stats(self, request: Request) -> Response:  # noqa: ARG002
        """The counts of /metrics as JSON, for the page."""
        self.metrics.made(0, time.monotonic())
        cache = None if self.metrics.cache is None else self.metrics.cache()._asdict()
        engine = self.exchange.engine.stats._asdict()
        return _json({"engine": engine, "cache": cache, "tokens_per_second": self.metrics.rate})

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        return _json({"status": "draining" if self.draining else "ok"}, 503 if self.draining else 200)

    async def measures(self, request: Request) -> Response:  # noqa: ARG002
        self.metrics.made(0, time.monotonic())
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def home(self, request: Request) -> Response:  # noqa: ARG002
        return Response(page(), media_type="text/html", headers={"content-security-policy": policy(), **SAFE})

    async def _answer(self, request: Request, read: Callable[[Mapping[str, Any]], Asked]) -> Any:
        self._check_open()
        body = await self._body(request)
        large = len(body) > LARGE
        asked = await _run(large, lambda: _read(body, read))
        job = Job(self.exchange, asked.stream or bool(asked.stop))
        try:
            many = large or len(asked.prompts) * asked.n > MANY
            job.submit(await _run(many, lambda: self._requests(asked, request.state.owner)))
        except Full as full:
            self._check_open()  # the engine may have stopped while the body came
            message = f"the queue is full: {full}" if str(full) else "the queue is full"
            raise Refused(429, message, code="queue_full", headers={"retry-after": RETRY}) from None
        except ValueError as error:
            raise Refused(400, str(error)) from error
        path = request.url.path
        answer = Answer(asked, job, self.reader.vocabulary, self.reader.name, lambda *ended: self._ended(path, *ended))
        self.answers.add(answer)
        return answer

    def _requests(self, asked: Asked, owner: str) -> list[Choice]:
        requests = requests_of(asked, owner)
        self.exchange.engine.check(requests)
        return requests

    def _check_open(self) -> None:
        if self.draining:
            raise Refused(503, "the server is shutting down", code="shutting_down", headers={"retry-after": RETRY})

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(415, f"content-type={shown(kind)} cannot work: accepted is application/json")
        parts, size = [], 0
        length = request.headers.get("content-length", "")
        told = int(length) if length.isdecimal() else 0
        try:
            async with asyncio.timeout(PATIENCE):
                async for part in request.stream():
                    size += len(part)
                    if max(size, told) > self.largest:
                        message = f"the body is too large: accepted are {self.largest:,} bytes"
                        raise Refused(413, message, headers={"connection": "close"})
                    parts.append(part)
        except TimeoutError:
            raise Refused(408, f"the body took more than {PATIENCE:.0f} s", headers={"connection": "close"}) from None
        return b"".join(parts)

    def _ended(self, path: str, answer: Answer, status: int) -> None:
        self.answers.discard(answer)
        if answer.failure is not None:
            self._log_failure(path, answer.failure)
        job, seconds = answer.job, time.monotonic() - answer.job.begun
        self.metrics.requests.labels(path, str(status)).inc()
        self.metrics.seconds.observe(seconds)
        usage = answer.usage()
        first = "" if job.first is None else f" first={job.first:.3f}s"
        prompts = f" prompts={answer.asked.prompts}" if self.log_prompts else ""
        why = f" ({job.gone})" if status == 499 else ""  # clients also leave when they have it all
        logger.info(
            "%s %s %d prompt=%d cached=%d made=%d%s seconds=%.3f%s%s", answer.id, path, status, usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"], first, seconds, why, prompts,
        )  # fmt: skip

    def _guarded(self, endpoint: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
        """Check the key, and answer errors in OpenAI's form. A log line of an error does not tell what was asked."""

        async def call(request: Request) -> Any:
            try:
                request.state.owner = self._owner(request)
                return await endpoint(request)
            except (Refused, HTTPException) as refused:
                status = refused.status if isinstance(refused, Refused) else refused.status_code
                self.metrics.requests.labels(request.scope["route"].path, str(status)).inc()
                self._log_refusal(request.scope["route"].path, status, refused)
                raise
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                self._log_failure(request.url.path, error)
                self.metrics.requests.labels(request.scope["route"].path, "500").inc()
                return _json(Refused(500, "the server failed; its log says where").content(), 500)

        return call

    def _log_refusal(self, path: str, status: int, refused: Refused | HTTPException) -> None:
        """What was wrong may quote a prompt, so only names that we know are told."""
        parts = (
            [refused.code, refused.param if refused.param in KNOWN else None] if isinstance(refused, Refused) else []
        )
        why = ", ".join(part for part in parts if part) if not self.log_prompts else str(refused)
        logger.info("%s %d refused%s", path, status, f": {why}" if why else "")

    def _log_failure(self, path: str, error: Exception) -> None:
        where = "".join(traceback.format_tb(error.__traceback__))
        what = f": {error}" if self.log_prompts else ""  # its message may quote a prompt
        logger.error("%s failed: %s%s\n%s", path, type(error).__name__, what, where)

    def _owner(self, request: Request) -> str:
        """Who asks: a hash of the API key, which the cache hashes again. Every wrong key takes the same time."""
        if not self.keys:
            return ""
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        fits = [hmac.compare_digest(given.strip().encode("latin-1"), key.encode()) for key in self.keys]
        if kind.lower() != "bearer" or not any(fits):
            message = "a valid API key is missing: send it as Authorization: Bearer KEY"
            raise Refused(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return hashlib.blake2b(given.strip().encode("latin-1"), person=b"subquad owner").hexdigest()

    async def _sweep(self) -> None:
        """Cut off clients that have not read for a minute."""
        while True:
            await asyncio.sleep(STALLED / 6)
            late = time.monotonic() - STALLED
            for answer in list(self.answers):
                if answer.sending is not None and answer.sending < late and answer.task is not None:
                    answer.job.leave(f"the client has not read for {STALLED:.0f} s")
                    answer.task.cancel()


async def _run(aside: bool, function: Callable[[], T]) -> T:
    """Call a function; `aside` in a thread, so that streams do not wait for it."""
    return await asyncio.to_thread(function) if aside else function()


def _read(body: bytes, read: Callable[[Mapping[str, Any]], Asked]) -> Asked:
    try:
        parsed = parse_json(body, "the body")
    except ValueError as error:
        raise Refused(400, str(error)) from error
    if not isinstance(parsed, dict):
        raise Refused(400, f"the body holds a {type(parsed).__name__}: accepted is a JSON object")
    return read(parsed)


def _json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:  # noqa: ARG001
    assert isinstance(error, Refused)
    return _json(error.content(), error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = {404: f"{shown(request.url.path)} is not here", 405: f"{request.method} cannot be used here"}
    refused = Refused(error.status_code, detail.get(error.status_code, error.detail))
    return _json(refused.content(), error.status_code, error.headers)
