"""What Prometheus reads at /metrics."""

from collections import deque
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

WINDOW = 10.0  # seconds over which tokens/s are counted
SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)
ENGINE = {  # fields of the engine's Stats: names and helps of gauges, and of counters
    "running": ("running_requests", "Requests that draw tokens."),
    "queued": ("queued_requests", "Requests that wait for a slot."),
    "prefilling": ("prefilling_requests", "Requests whose prompt is being read."),
    "free": ("free_slots", "Slots that no request holds."),
    "state_bytes": ("state_bytes", "Bytes of the states of all slots."),
    "bytes_per_stream": ("state_bytes_per_slot", "Bytes of the state of one slot."),
}
TOTALS = {
    "steps": ("steps", "Steps of the whole batch."),
    "tokens": ("generated_tokens", "Tokens that were drawn."),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "cached_tokens": ("cached_tokens", "Tokens of prompts that came from the cache."),
    "drafted": ("drafted_tokens", "Tokens that the draft model proposed."),
    "accepted": ("accepted_tokens", "Tokens of the draft model that were accepted."),
}
LEVELS = ("entries", "bytes", "limit", "files", "file_bytes")  # counts of the cache that go up and down


class Metrics:
    """`stats` gives the engine's counts, `cache` those of the prefix cache, or None."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.stats: Callable[[], Any] | None = None
        self.cache: Callable[[], Any] | None = None
        self.slots = 0
        self.requests = Counter("subquad_requests", "Answered requests.", ("path", "status"), registry=self.registry)
        self.first_token = Histogram(
            "subquad_time_to_first_token_seconds", "From a request to its first token.", buckets=SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "subquad_request_seconds", "From a request to the end of its answer.", buckets=SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self.recent: deque[tuple[float, int]] = deque()  # when tokens were made, and how many
        self.now = 0.0
        self.registry.register(self)

    def made(self, tokens: int, now: float) -> None:
        """Count tokens for tokens/s."""
        self.now = now
        if tokens:
            self.recent.append((now, tokens))
        while self.recent and self.recent[0][0] < now - WINDOW:
            self.recent.popleft()

    def collect(self) -> Any:
        """Called by Prometheus' client."""
        yield _gauge("slots", "Slots of the running batch.", self.slots)
        yield _gauge("tokens_per_second", f"Tokens drawn in the last {WINDOW:.0f} s, a second.", self.rate)
        if self.stats is not None:
            stats = self.stats()
            for field, (name, help) in ENGINE.items():
                yield _gauge(name, help, getattr(stats, field))
            for field, (name, help) in TOTALS.items():
                yield CounterMetricFamily(f"subquad_{name}", help, value=getattr(stats, field))
        if self.cache is not None:
            stats = self.cache()
            for field, value in stats._asdict().items():
                help = f"The prefix cache: {field.replace('_', ' ')}."
                if field in LEVELS:
                    yield _gauge(f"cache_{field}", help, value)
                else:
                    yield CounterMetricFamily(f"subquad_cache_{field}", help, value=value)

    @property
    def rate(self) -> float:
        return sum(tokens for _, tokens in self.recent) / WINDOW

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _gauge(name: str, help: str, value: float) -> Any:
    return GaugeMetricFamily(f"subquad_{name}", help, value=value)
