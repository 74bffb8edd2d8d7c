"""`subquad serve`: load a model, start its engine, listen, and stop gracefully."""

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import uvicorn
from rich.console import Console

from subquad.checks import check_plain, refuse
from subquad.data import files
from subquad.machine import available
from subquad.models import LanguageModel, load, shipped
from subquad.models.decoding import limit_of, values_of
from subquad.models.footprint import bytes_per_stream
from subquad.models.saving import check_finite, of_transformers, read_header
from subquad.serve.app import PATIENCE, Service, logger
from subquad.serve.body import Reader
from subquad.serve.engine import Engine
from subquad.serve.exchange import Exchange
from subquad.serve.metrics import Metrics
from subquad.serve.settings import GB, MB, SLOTS, ServeSettings
from subquad.serve.vocabulary import Vocabulary, vocabulary_of
from subquad.tasks import writer_of
from subquad.tasks.images import SETS, Images
from subquad.tasks.write_images import image_shape

LONGEST = 1 << 20  # tokens of a prompt and its answer, where the model sets no limit
CONNECTIONS = 65536  # files that the process may open, if the system lets it
COLLECT = 20_000  # new objects before the collector runs: a turn of 1,000 streams makes thousands, and none in circles
CLOSING = 5  # seconds for answers that were cancelled to be sent


def serve(checkpoint: str, settings: ServeSettings, console: Console) -> None:
    """Serve a saved model until SIGTERM or Ctrl-C. `checkpoint`: a run, a model's folder, or a checkpoint's name.

    The folder may be one that transformers saved, such as those of `subquad linearise`.
    """
    service = make_service(checkpoint, settings)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    _allow_connections()
    with _listen(settings.host, settings.port) as listener:
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        console.print(f"serving {service.reader.name} at {address}", highlight=False, soft_wrap=True, markup=False)
        if not service.keys and host not in ("127.0.0.1", "::1"):
            logger.warning("%s can be reached from other machines, and no API key is asked for", address)
        gc.collect()
        gc.freeze()  # what was imported stays: the collector need not search it again and again
        gc.set_threshold(COLLECT, *gc.get_threshold()[1:])
        Server(service, settings.drain).run(sockets=[listener])


class Server(uvicorn.Server):
    """Uvicorn, which after a signal answers 503 to new requests while others finish, and only then closes."""

    def __init__(self, service: Service, drain: float):
        config = uvicorn.Config(
            service.app(), log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=CLOSING,
            server_header=False,
        )  # fmt: skip
        super().__init__(config)
        self.service, self.drain = service, drain
        self.silent: dict[tuple[Any, Any], float] = {}  # connections without a request, and since when

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.should_exit:  # a second signal: do not wait
            self.force_exit = True
        self.should_exit = True
        logger.info("%s: finishing what runs", signal.Signals(sig).name)

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:
            self._close_silent()
        return await super().on_tick(counter)

    def _close_silent(self) -> None:
        """Close connections on which headers do not come to an end: uvicorn waits for ever."""
        now = time.monotonic()
        connections: list[Any] = [one for one in self.server_state.connections if hasattr(one, "cycle")]
        idle = [(one, one.cycle) for one in connections if one.cycle is None or one.cycle.response_complete]
        self.silent = {key: self.silent.get(key, now) for key in idle}
        for (connection, _), since in self.silent.items():
            if since < now - PATIENCE:
                connection.transport.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.draining = True
        until = time.monotonic() + self.drain
        while self.service.answers and time.monotonic() < until and not self.force_exit:
            await asyncio.sleep(0.05)
        # ends the rest: their clients get an error
        await asyncio.to_thread(self.service.exchange.engine.stop, drain=False)
        await super().shutdown(sockets)


def make_service(checkpoint: str, settings: ServeSettings) -> Service:
    """Everything but the sockets."""
    keys, device = _keys(settings.api_key_env), available(settings.device)
    folder = _find(checkpoint)
    model, card = _load(folder, device, settings.dtype), {} if of_transformers(folder) else shipped.card(folder)
    draft = None if settings.draft is None else _load(_find(settings.draft, "draft"), device, settings.dtype)
    vocabulary = vocabulary_of(folder, model, card, settings.chat_template)
    cache = _cache(model, settings)
    metrics = Metrics()
    exchange = Exchange(metrics, in_turn=model.device.type == "cpu")
    slots = settings.slots or SLOTS[model.device.type]
    limit = limit_of(model)
    if settings.capacity is not None and limit is not None and settings.capacity > limit + 1:
        refuse("capacity", settings.capacity, f"at most {limit + 1:,}, as this model has {limit:,} positions")
    positions = settings.capacity if limit is None else min(settings.capacity or limit, limit)
    exchange.engine = Engine(
        model, slots=slots, capacity=positions, queue=settings.queue, cache=cache, draft=draft,
        deliver=exchange.deliver,
    )  # fmt: skip
    # the last token of an answer takes no position
    longest = settings.capacity or (min(exchange.engine.capacity, LONGEST) if limit is None else limit + 1)
    metrics.slots, metrics.stats = slots, lambda: exchange.engine.stats
    metrics.cache = None if cache is None else lambda: cache.stats
    name = settings.name or Path(checkpoint).resolve().name
    state = exchange.engine.stats.bytes_per_stream
    about = {
        "id": name, "object": "model", "created": int((folder / "config.json").stat().st_mtime), "owned_by": "subquad",
        "subquad": _describe(model, card, vocabulary, longest, state, slots, settings),
    }  # fmt: skip
    return Service(
        reader=Reader(name, vocabulary, longest), exchange=exchange, metrics=metrics, about=about, keys=keys,
        largest=int(settings.body_mb * MB), log_prompts=settings.log_prompts,
        close=cache.close if cache is not None else lambda: None,
        origins=tuple(part.strip() for part in (settings.cors or "").split(",") if part.strip()),
    )  # fmt: skip


def _find(checkpoint: str, option: str = "checkpoint") -> Path:
    return Path(checkpoint) if of_transformers(checkpoint) else shipped.find(checkpoint, option)


def _load(folder: Path, device: str, dtype: str) -> Any:
    """A language model of ours, or a decoder of transformers with our states."""
    if of_transformers(folder):
        return _load_theirs(folder, device, dtype)
    kind = read_header(folder)["model"]
    if kind != LanguageModel.__name__:
        raise ValueError(f"{folder} is a saved {kind}, which cannot be served: accepted is a language model")
    model = load(folder, device)
    check_finite(model, folder)
    if dtype != "auto" or torch.device(device).type == "cpu":  # shipped models have 16 bits, which are slow on CPUs
        model = model.to(torch.float32 if dtype == "auto" else getattr(torch, dtype))
    return model


def _load_theirs(folder: Path, device: str, dtype: str) -> Any:
    files.extra("transformers", "hf", "folders that transformers saved")
    from subquad.hf import Decoder

    kind = getattr(torch, dtype, torch.float32 if torch.device(device).type == "cpu" else None)  # "auto" is no type
    model = Decoder.load(folder, device, kind)
    check_finite(model, folder)
    return model


def _cache(model: Any, settings: ServeSettings) -> Any:
    if settings.cache_gb == 0:
        if settings.cache_dir is not None:
            refuse("cache_dir", str(settings.cache_dir), "none with cache_gb=0")
        return None
    from subquad.serve.cache import PrefixCache

    return PrefixCache.of(model, int(settings.cache_gb * GB), folder=settings.cache_dir)


def _keys(variable: str | None) -> tuple[str, ...]:
    if variable is None:
        return ()
    keys = tuple(key.strip() for key in os.environ.get(variable, "").split(",") if key.strip())
    if not keys:
        raise ValueError(f"api_key_env={variable!r} cannot work: that environment variable holds no key")
    if odd := [number for number, key in enumerate(keys, 1) if not (key.isascii() and key.isprintable())]:
        accepted = "accepted are printable characters of ASCII"
        raise ValueError(
            f"api_key_env={variable!r} cannot work: key {odd[0]} of {len(keys)} is not in ASCII; {accepted}"
        )
    return keys


def _describe(
    model: Any, card: Mapping[str, Any], vocabulary: Vocabulary, longest: int, state: int,
    slots: int, settings: ServeSettings,
) -> dict[str, Any]:  # fmt: skip
    """What the page and other clients can know of a model, beyond OpenAI's fields."""
    stack = model.config.transformer
    width = torch.finfo(model.dtype).bits // 8
    names = dict.fromkeys(mixer.name for mixer in stack.mechanism)
    return {
        "writes": vocabulary.kind,
        "vocab": vocabulary.vocab,
        "start": vocabulary.start,  # what an empty prompt is
        "ends": list(vocabulary.ends),
        "image": _image(model, card),
        "chat": vocabulary.template is not None,
        "longest": longest,  # tokens of a prompt and its answer
        "mechanisms": list(names),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "slots": slots,
        "draft": settings.draft is not None,
        "state_bytes": state,  # of one request, at its full length
        "state_bytes_first": bytes_per_stream(model, 1),  # after one token; the same unless states grow
        "kv_bytes_per_token": 2 * stack.depth * stack.kv_width * width,  # what softmax in all layers would keep
    }


def _image(model: Any, card: Mapping[str, Any]) -> dict[str, int] | None:
    task = writer_of(model, card)
    if not issubclass(task, Images):
        return None
    data = card.get("data")
    named = data.get("set") if isinstance(data, Mapping) else None
    known = SETS.get(named) if isinstance(named, str) else None
    shape = image_shape(model, None, None if known is None else known.shape)
    if shape is None:
        return None
    rows, columns, channels = shape
    shades = min(values_of(model), (model.config.embedding.vocab or 0) - 1)
    return {
        "rows": rows, "columns": columns, "channels": channels, "shades": shades, "tokens": math.prod(shape),
    }  # fmt: skip


def _listen(host: str, port: int) -> socket.socket:
    check_plain("host", host, str)
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"host={host!r}, port={port} cannot be listened on: {why}") from error


def _allow_connections() -> None:
    """As many open files as the system lets this process have: a connection is one."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, CONNECTIONS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
