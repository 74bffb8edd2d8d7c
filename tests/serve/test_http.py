"""The server against clients nobody here wrote: openai, httpx and curl; and against clients that misbehave."""

import asyncio
import contextlib
import dataclasses
import gc
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from subquad.models import LanguageModel
from subquad.serve import answer, app, engine, exchange, server
from subquad.serve.metrics import Metrics
from subquad.serve.request import Drawn, Full, Update
from subquad.serve.settings import ServeSettings
from tests.serve.scripted import Scripted

KEY = "sk-one"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


class Live:
    """A server in a thread of this process."""

    def __init__(self, service: Any):
        self.service, self.engine = service, service.exchange.engine
        listener = server._listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = server.Server(service, drain=5.0)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]})
        self.thread.start()
        until(lambda: self.server.started)
        self.http = httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=120)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def stop(self) -> None:
        self.http.close()
        self.server.handle_exit(signal.SIGTERM, None)
        self.thread.join()


def until(true: Callable[[], Any], seconds: float = 120) -> None:
    """Wait for something that another thread or process does."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    LanguageModel(vocab=256, dim=16, depth=1, heads=2, mechanism="linear", positions="none").save(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "Engine", Scripted)
        patch.setenv("TEST_KEYS", f"{KEY}, sk-two")
        options = ServeSettings(
            cache_gb=0.0, capacity=400, device="cpu", api_key_env="TEST_KEYS", body_mb=0.05, slots=128
        )
        found = Live(server.make_service(str(folder), options))
    yield found
    found.stop()


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_openai_completes(client: openai.OpenAI) -> None:
    done = client.completions.create(model="tiny", prompt=["añb", "xyz"], max_tokens=7, n=2, seed=3)
    texts = [choice.text for choice in done.choices]
    assert texts == ["añbañ", "añbañ", "xyzxyzx", "xyzxyzx"]
    assert {choice.finish_reason for choice in done.choices} == {"length"}
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (7, 28)
    assert done.usage.prompt_tokens_details.cached_tokens == 3
    assert client.completions.create(model="tiny", prompt=list(b"hello"), max_tokens=5).choices[0].text == "hello"
    assert [model.id for model in client.models.list()] == ["tiny"] == [client.models.retrieve("tiny").id]


def test_openai_streams(client: openai.OpenAI) -> None:
    events = list(client.completions.create(
        model="tiny", prompt="añb stop me", max_tokens=100, stop=["p m", "zzz"], stream=True,
        stream_options={"include_usage": True},
    ))  # fmt: skip
    assert "".join(choice.text for event in events for choice in event.choices) == "añb sto"
    assert events[-2].choices[0].finish_reason == "stop"
    assert (events[-1].choices, events[-1].usage.completion_tokens) == ([], 11)


def test_openai_chats(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    done = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=9, logprobs=True, top_logprobs=2
    )
    (choice,) = done.choices
    assert choice.message.content == "user: hi\n"
    first = choice.logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("u", -0.5, [ord("u")])
    assert [other.token for other in first.top_logprobs] == ["u", "?"]
    events = list(client.chat.completions.create(model="tiny", messages=messages, max_tokens=6, stream=True, n=2))
    assert [events[0].choices[0].delta.role, events[1].choices[0].index] == ["assistant", 1]
    for index in range(2):
        parts = [choice.delta.content for event in events for choice in event.choices if choice.index == index]
        assert "".join(parts) == "user: "


def test_openai_streams_to_many_at_once(live: Live) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="sk-two") as many:

            async def one(number: int) -> None:
                prompt, text = f"prompt {number} ", ""
                stream = await many.completions.create(model="tiny", prompt=prompt, max_tokens=60, stream=True)
                async for event in stream:
                    text += event.choices[0].text
                assert text == (prompt * 60)[:60]

            await asyncio.gather(*(one(number) for number in range(40)))

    asyncio.run(main())


def test_echo_and_logprobs(client: openai.OpenAI) -> None:
    (choice,) = client.completions.create(model="tiny", prompt="ñab", max_tokens=0, echo=True, logprobs=1).choices
    assert (choice.text, choice.finish_reason) == ("ñab", "length")
    assert choice.logprobs.tokens == ["bytes:\\xc3", "bytes:\\xb1", "a", "b"]
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
    assert choice.logprobs.text_offset == [0, 0, 1, 2]
    (choice,) = client.completions.create(model="tiny", prompt="ab", max_tokens=3, echo=True, logprobs=0).choices
    assert choice.text == "ababa"
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
    assert choice.model_extra["tokens"] == list(b"aba")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(live: Live) -> None:
    words = ["curl", "-sN", "-H", f"Authorization: Bearer {KEY}", "-H", "Content-Type: application/json"]
    body = json.dumps({"prompt": "abc", "max_tokens": 5, "stream": True})
    done = subprocess.run(
        [*words, "-d", body, f"{live.url}/v1/completions"], capture_output=True, text=True, check=True
    )
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == "abcab"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("completions", {"prompt": 3}, 400, "prompt"),
        ("completions", {"prompt": ["a", [1]]}, 400, "prompt"),
        ("completions", {"prompt": [1, 256]}, 400, "prompt"),
        ("completions", {"prompt": [True]}, 400, "prompt"),
        ("completions", {"prompt": "\ud800"}, 400, "prompt"),
        ("completions", {"prompt": "a" * 401}, 400, "prompt"),
        ("completions", {"prompt": "a", "max_tokens": 401}, 400, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": 400}, 400, "max_tokens"),
        ("completions", {"prompt": []}, 400, "prompt"),
        ("completions", {"prompt": [[]]}, 400, "prompt"),
        ("completions", {"prompt": [[1], []]}, 400, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}, 400, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": "9"}, 400, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": True}, 400, "max_tokens"),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "a", "top_p": -0.1}, 400, "top_p"),
        ("completions", {"prompt": "a", "top_p": 1.1}, 400, "top_p"),
        ("completions", {"prompt": "a", "n": 0}, 400, "n"),
        ("completions", {"prompt": ["a"] * 600, "n": 2}, 400, "n"),
        ("completions", {"prompt": "a", "stop": [""]}, 400, "stop"),
        ("completions", {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
        ("completions", {"prompt": "a", "frequency_penalty": 0.5}, 400, "frequency_penalty"),
        ("completions", {"prompt": "a", "logit_bias": {"5": 1}}, 400, "logit_bias"),
        ("completions", {"prompt": "a", "best_of": 2}, 400, "best_of"),
        ("completions", {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
        ("completions", {"promt": "a"}, 400, "promt"),
        ("completions", {"prompt": "a", "model": "gpt-5"}, 404, "model"),
        ("chat/completions", {}, 400, "messages"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, 400, "tools"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 1}, 400, "top_logprobs"),
    ],
)
def test_wrong_requests_are_refused_by_name(live: Live, path: str, body: Any, status: int, param: str) -> None:
    done = live.http.post(f"/v1/{path}", content=json.dumps(body), headers={"content-type": "application/json"})
    error = done.json()["error"]
    assert (done.status_code, error["param"]) == (status, param)
    assert error["type"] == ("invalid_request_error" if status == 400 else "not_found_error")
    assert param in error["message"] or param == "prompt"


@pytest.mark.parametrize(
    ("body", "accepted"),
    [
        ({"stop": 5}, "stop=5 cannot work: accepted is a text or a list of texts"),
        ({"stop": ["a", 5]}, "stop=['a', 5] cannot work: accepted is a text or a list of texts"),
        ({"user": 5}, "user=5 cannot work: accepted is a text"),
        ({"seed": -(2**63)}, f"seed={-(2**63)} cannot work: accepted is an integer from -(2**63 - 1) to 2**63 - 1"),
        ({"seed": "a"}, "seed='a' cannot work: accepted is an integer"),
    ],
)
def test_errors_say_what_is_accepted(live: Live, body: Any, accepted: str) -> None:
    assert live.post("/v1/completions", prompt="a", **body).json()["error"]["message"] == accepted


def test_a_prompt_and_its_answer_have_as_many_tokens_as_the_server_says(live: Live) -> None:
    assert live.http.get("/v1/models").json()["data"][0]["subquad"]["longest"] == 400
    done = live.post("/v1/completions", prompt="a" * 390, max_tokens=10)
    assert done.json()["usage"]["total_tokens"] == 400
    done = live.post("/v1/completions", prompt="a" * 390, max_tokens=11)
    assert done.json()["error"]["message"].endswith("accepted is at most 10")
    for size in (400, 401):
        done = live.post("/v1/completions", prompt="a" * size)
        assert f"has {size} tokens: accepted are at most 400 with the answer's" in done.json()["error"]["message"]


def test_no_tokens_may_be_asked_for(live: Live) -> None:
    done = live.post("/v1/completions", prompt="abc", max_tokens=0).json()
    assert (done["choices"][0]["text"], done["choices"][0]["finish_reason"]) == ("", "length")
    assert (done["usage"]["prompt_tokens"], done["usage"]["completion_tokens"]) == (3, 0)
    lines = live.post("/v1/completions", prompt="abc", max_tokens=0, stream=True).text.split("\n\n")
    (event,) = (json.loads(line[6:]) for line in lines if line and line != "data: [DONE]")
    assert (event["choices"][0]["text"], event["choices"][0]["finish_reason"]) == ("", "length")


def test_an_empty_prompt_is_echoed_as_nothing(live: Live) -> None:
    """The model begins with a start token, which nobody wrote."""
    for logprobs in (None, 1):
        body = {"prompt": ["", "ab"], "max_tokens": 2, "echo": True, "logprobs": logprobs}
        empty, other = live.post("/v1/completions", **body).json()["choices"]
        assert (empty["text"], other["text"]) == ("\n\n", "abab")
    assert empty["logprobs"]["tokens"] == ["\n", "\n"]
    assert other["logprobs"]["text_offset"] == [0, 1, 2, 3]


def test_top_p_of_zero_is_the_most_probable_token(real: Live) -> None:
    greedy, zero = (
        real.post("/v1/completions", prompt="abc", max_tokens=20, seed=3, **how).json()["choices"][0]["tokens"]
        for how in ({"temperature": 0}, {"top_p": 0, "temperature": 2})
    )
    assert greedy == zero


def test_choices_are_not_those_of_another_seed(real: Live) -> None:
    def texts(seed: int, n: int) -> list[list[int]]:
        done = real.post("/v1/completions", prompt="abc", max_tokens=12, n=n, seed=seed, ignore_eos=True)
        return [choice["tokens"] for choice in done.json()["choices"]]

    many = [text for seed in (-1, 2**62 - 1, 5, 6, 7) for text in texts(seed, 3)]
    assert len({tuple(text) for text in many}) == 15
    assert texts(5, 1) == texts(5, 3)[:1]
    assert len({answer.seed_of(seed, number) for seed in range(50) for number in range(50)}) == 2500


def test_refused_requests_have_a_line_in_the_log(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    live.post("/v1/completions", prompt="my secret", top_p=7)
    live.post("/v1/completions", secret=1)
    live.post("/v1/completions", prompt="my secret " * 6000)
    live.http.post("/v1/completions", json={"prompt": "secret"}, headers={"authorization": "Bearer secret"})
    said = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    path = "/v1/completions"
    assert said == [
        f"{path} 400 refused: top_p", f"{path} 400 refused", f"{path} 413 refused",
        f"{path} 401 refused: invalid_api_key",
    ]  # fmt: skip
    assert "secret" not in caplog.text


def test_connections_whose_headers_never_end_are_closed(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    address = ("127.0.0.1", int(live.url.rpartition(":")[2]))
    with socket.create_connection(address) as first, socket.create_connection(address) as later:
        first.sendall(b"GET /health HTTP/1.1\r\nhost:")
        later.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert later.recv(1 << 16).startswith(b"HTTP/1.1 200")
        later.sendall(b"GET /health HT")
        monkeypatch.setattr(server, "PATIENCE", 0.5)
        for half in (first, later):
            half.settimeout(60)
            with contextlib.suppress(ConnectionResetError):
                while half.recv(1 << 16):  # perhaps the end of the first answer, and then that of the connection
                    pass


def test_options_that_cannot_work_are_refused_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEYS", "sk-one,sk-zwölf")
    for match, options in {
        "api_key_env='TEST_KEYS' cannot work: key 2 of 2 is not in ASCII": {"api_key_env": "TEST_KEYS"},
        "draft='nonsense' is neither": {"draft": "nonsense"},
    }.items():
        with pytest.raises((ValueError, FileNotFoundError), match=match):
            server.make_service(str(folder), ServeSettings(device="cpu", **options))
    with pytest.raises(ValueError, match="name='' cannot work"):
        ServeSettings(name="")


def test_neutral_values_are_accepted(live: Live) -> None:
    neutral = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "logit_bias": {},
        "best_of": 1,
        "user": "me",
        "suffix": None,
    }
    done = live.post("/v1/completions", prompt="a", max_tokens=1, top_k=-1, min_p=0.1, metadata={"a": "b"}, **neutral)
    assert done.status_code == 200, done.text


@pytest.fixture(scope="module")
def real(folder: Path) -> Iterator[Live]:
    """The real engine behind HTTP."""
    options = ServeSettings(cache_gb=0.1, device="cpu", slots=4, queue=40)
    found = Live(server.make_service(str(folder), options))
    yield found
    found.stop()


@pytest.mark.parametrize(("size", "choices"), [(70_000, 3), (5, 40)])
def test_a_long_prompt_is_checked_once_and_beside_the_event_loop(
    real: Live, monkeypatch: pytest.MonkeyPatch, size: int, choices: int
) -> None:
    checked, check = list[int | None](), engine._check_tokens

    def note(name: str, tokens: tuple[int, ...], count: int) -> None:
        if name == "prompt":
            checked.append(threading.get_ident())
        check(name, tokens, count)

    monkeypatch.setattr(engine, "_check_tokens", note)
    monkeypatch.setattr(app, "MANY", 30)
    with real.http.stream("POST", "/v1/completions", json={"prompt": "a" * size, "n": choices, "stream": True}):
        pass
    assert len(checked) == 1
    assert checked[0] != real.thread.ident


def test_more_choices_than_ever_fit_are_refused_for_good(real: Live) -> None:
    until(lambda: not real.engine.known)  # those of other tests
    done = real.post("/v1/completions", prompt="x", n=45)
    assert (done.status_code, done.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "at most 44, as slots=4 and queue=40" in done.json()["error"]["message"]
    assert len(real.post("/v1/completions", prompt="x", n=44, max_tokens=2).json()["choices"]) == 44


def test_statuses_of_http(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    def status(done: httpx.Response) -> tuple[int, str]:
        return done.status_code, done.json()["error"]["type"]

    path, json_type = "/v1/completions", {"content-type": "application/json"}
    wrong = "invalid_request_error"
    assert status(live.http.post(path, content=b'{"prompt": "a"', headers=json_type)) == (400, wrong)
    assert status(live.http.post(path, content=b"\xff", headers=json_type)) == (400, wrong)
    assert status(live.http.post(path, content=b"[" * 9000, headers=json_type)) == (400, wrong)
    assert status(live.http.post(path, content=b"[]", headers=json_type)) == (400, wrong)
    assert status(live.http.post(path, data={"prompt": "a"})) == (415, wrong)
    assert status(live.post(path, prompt="a" * 60_000)) == (413, wrong)
    chunks = (b"x" * 1000 for _ in range(100))  # without a length
    assert status(live.http.post(path, content=chunks, headers=json_type)) == (413, wrong)
    assert status(live.http.get("/v1/nowhere")) == (404, "not_found_error")
    assert status(live.http.get("/v1/models/gpt")) == (404, "not_found_error")
    done = live.http.get(path)
    assert (*status(done), done.headers["allow"]) == (405, wrong, "POST")
    for key in ("", "Bearer wrong", "Bearer", f"Basic {KEY}", "Bearer \xff"):
        done = live.http.post(path, json={"prompt": "a"}, headers={"authorization": key.encode("latin-1")})
        assert status(done) == (401, "authentication_error")
    assert live.http.get("/health", headers={"authorization": ""}).json() == {"status": "ok"}
    assert "<title>" in live.http.get("/").text
    live.engine.queue = 0
    done = live.post(path, prompt=["a", "b"])
    live.engine.queue = 1024
    assert (*status(done), done.headers["retry-after"]) == (429, "rate_limit_error", "2")
    assert "access-control-allow-origin" not in live.http.get("/health", headers={"origin": "http://evil"}).headers


def test_owners_are_hashes_of_keys(live: Live) -> None:
    live.engine.owners.clear()
    for key in (KEY, "sk-two", KEY):
        live.http.post("/v1/completions", json={"prompt": "a"}, headers={"authorization": f"Bearer {key}"})
    assert len(live.engine.owners) == 2
    assert not any("sk-" in owner or not owner for owner in live.engine.owners)


def mistake(self: answer.Answer, pieces: Any) -> Any:
    raise KeyError(bytes(self.asked.prompts[0]))


def test_failures_are_told_and_logs_hold_no_prompts(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    live.post("/v1/completions", prompt="my secret", max_tokens=3)
    live.engine.fails = True
    try:
        for stream in (False, True):
            done = live.post("/v1/completions", prompt="my secret", stream=stream)
            assert (done.status_code, done.json()["error"]["type"]) == (500, "server_error")
    finally:
        live.engine.fails = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer.Answer, "_object", mistake)
        assert live.post("/v1/completions", prompt="my secret", max_tokens=3).status_code == 500
    until(lambda: "KeyError" in caplog.text)
    assert "/v1/completions 200 prompt=9" in caplog.text
    assert "the client has left" not in caplog.text
    assert "secret" not in caplog.text


def test_a_model_is_called_what_its_folder_is_called(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("model", "runs/mine/model"):
        shutil.copytree(folder, place)
    options = ServeSettings(device="cpu", cache_gb=0)
    assert server.make_service("model", options).about["subquad"]["slots"] == 16  # all cost time in each step on a CPU
    names = [server.make_service(path, options).about["id"] for path in ("model", "runs/mine", "runs/mine/")]
    assert names == ["model", "mine", "mine"]
    assert server.make_service("model", dataclasses.replace(options, name="other")).about["id"] == "other"


def test_a_body_that_comes_while_the_engine_stops(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, **__: Any) -> list[int]:
        live.service.draining = True
        raise Full("the engine stops: no new requests")

    monkeypatch.setattr(live.engine, "submit_all", stopped)
    try:
        done = live.post("/v1/completions", prompt="a")
        assert (done.status_code, done.json()["error"]["code"]) == (503, "shutting_down")
    finally:
        live.service.draining = False


def test_metrics_are_prometheus_text(live: Live) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    live.post("/v1/completions", prompt="abc", max_tokens=3)
    families = {family.name: family for family in text_string_to_metric_families(live.http.get("/metrics").text)}
    values = {name: family.samples[0].value for name, family in families.items() if family.samples}
    assert values["subquad_slots"] == 128
    assert values["subquad_generated_tokens"] > 3
    assert values["subquad_tokens_per_second"] > 0
    assert families["subquad_time_to_first_token_seconds"].type == "histogram"
    assert {"subquad_queued_requests", "subquad_free_slots", "subquad_cached_tokens"} <= set(families)


def test_clients_that_vanish_leave_no_slot_taken(live: Live) -> None:
    """Every second one waits for a whole answer, the others read a little of a stream first."""
    address = ("127.0.0.1", int(live.url.rpartition(":")[2]))
    clients, before = [], live.engine.submitted
    live.engine.pause, kept = 0.2, live.engine.pause  # none ends by itself within a minute
    for number in range(100):
        body = json.dumps({"prompt": "abc", "max_tokens": 390, "stream": number % 2 == 0, "n": 1}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(body)}"
        clients.append(socket.create_connection(address))
        clients[-1].sendall(head.encode() + b"\r\n\r\n" + body)
    until(lambda: live.engine.submitted == before + 100)
    clients[0].recv(10)
    for vanishing in clients:
        vanishing.close()
    until(lambda: not live.engine.running and not live.engine.waiting)
    live.engine.pause = kept
    until(lambda: not live.service.answers)
    assert not live.service.exchange.jobs
    assert len(live.engine.cancelled) >= 100


@pytest.mark.parametrize("stream", [True, False])
def test_a_connection_is_freed_at_its_end(live: Live, stream: bool) -> None:
    """It is not part of a circle, which would stay in memory until the collector looks for it."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            body = {"prompt": "abc", "max_tokens": 5, "stream": stream}
            live.post("/v1/completions", **body).raise_for_status()
        until(lambda: not live.service.answers)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert "RequestResponseCycle" not in {type(found).__name__ for found in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def ask(live: Live, **body: Any) -> socket.socket:
    """A client that has sent a request and does no more."""
    sent = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(sent)}"
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", int(live.url.rpartition(":")[2])))
    client.sendall(head.encode() + b"\r\n\r\n" + sent)
    return client


def test_clients_of_the_real_engine_that_vanish_leave_no_slot_taken(real: Live) -> None:
    """Some while they wait, some while their prompt is read, some while tokens are drawn; others get their answers."""
    until(lambda: not real.engine.known)
    expected = real.post("/v1/completions", prompt="abc", max_tokens=5, seed=1).json()["choices"][0]["text"]
    body: dict[str, Any] = {"max_tokens": 100_000, "ignore_eos": True}
    clients = [
        ask(real, prompt="x" * (40_000 if number % 3 == 0 else 3), stream=number % 2 == 0, n=1 + number % 2, **body)
        for number in range(24)
    ]
    until(lambda: real.engine.stats.running > 0)
    for number, client in enumerate(clients):
        if number % 8 == 7:
            time.sleep(0.02)
        client.close()
    until(lambda: not real.engine.known and not real.service.answers)
    assert not real.service.exchange.jobs
    assert real.engine.stats[:4] == (0, 0, 0, 4)
    again = real.post("/v1/completions", prompt="abc", max_tokens=5, seed=1).json()["choices"][0]["text"]
    assert again == expected


def test_a_socket_that_is_not_read_is_cut_off(
    live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Through the system's buffers: one that reads gets all, and the slots of the other are free."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(exchange, "BEHIND", 5000)
    monkeypatch.setattr(exchange, "JOIN", 0.0)  # an event for each token
    live.engine.cancelled.clear()
    body: dict[str, Any] = {"prompt": "ab", "max_tokens": 390, "n": 100, "stream": True, "logprobs": 2}
    assert live.post("/v1/completions", **body).text.endswith("[DONE]\n\n")
    assert not live.engine.cancelled
    with ask(live, **body) as slow:
        until(lambda: len(live.engine.cancelled) == 100)
        assert not live.engine.running
        slow.settimeout(60)
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while part := slow.recv(1 << 16):
                said = (said + part)[-100:]
        assert b"[DONE]" not in said
    until(lambda: not live.service.answers)
    assert "499" in caplog.text
    assert "too slowly" in caplog.text


def test_slow_readers_are_cut_off(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that takes nothing: its slot is free once it is too far behind, and later its connection closes."""
    monkeypatch.setattr(exchange, "BEHIND", 50)
    asked = live.service.reader.completion({"prompt": "abc", "max_tokens": 300, "stream": True})

    async def main() -> answer.Answer:
        job = exchange.Job(live.service.exchange, True)
        slow = answer.Answer(asked, job, live.service.reader.vocabulary, "tiny", lambda *_: None)
        forever = asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await forever.wait()

        async def receive() -> Any:
            await forever.wait()

        loop, live.service.exchange.loop = live.service.exchange.loop, asyncio.get_running_loop()
        try:
            job.submit(answer.requests_of(asked, ""))
            task = asyncio.create_task(slow({}, receive, send))
            while not job.gone:
                await asyncio.sleep(0.005)
            assert not live.engine.running
            assert slow.sending is not None
            task.cancel()
            await task
        finally:
            live.service.exchange.loop = loop
        return slow

    slow = asyncio.run(main())
    assert "too slowly" in slow.job.gone
    assert slow.job.behind <= 51


@pytest.mark.parametrize("in_turn", [True, False])
def test_the_engine_does_not_run_away_from_the_event_loop(monkeypatch: pytest.MonkeyPatch, in_turn: bool) -> None:
    """In turn it waits for its own updates, otherwise for those before; and not for ever if the loop is stuck."""

    async def main() -> None:
        monkeypatch.setattr(exchange, "LAG", 60.0)
        between, taken = exchange.Exchange(Metrics(), in_turn), list[int]()
        between.loop = asyncio.get_running_loop()
        monkeypatch.setattr(between, "_take", lambda updates: taken.append(updates[0].number))

        def deliver() -> list[int]:
            seen = []
            for number in range(5):
                between.deliver([Update(number)])
                seen.append(len(taken))
            return seen

        seen = await asyncio.to_thread(deliver)
        assert seen == [1, 2, 3, 4, 5] if in_turn else all(number <= count for number, count in enumerate(seen))
        await asyncio.sleep(0)
        assert taken == list(range(5))
        monkeypatch.setattr(exchange, "LAG", 0.01)
        for number in range(3):
            between.deliver([Update(number)])  # from the loop itself, which cannot take them
        await asyncio.sleep(0)
        assert len(taken) == 8

    asyncio.run(main())


def test_events_of_a_stream_are_at_least_join_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time counts from the beginning of the last writing; the first token and the end do not wait."""

    async def main() -> None:
        monkeypatch.setattr(exchange, "JOIN", 0.1)
        between, written = exchange.Exchange(Metrics()), list[float]()
        between.loop = asyncio.get_running_loop()
        job = exchange.Job(between, streams=True)
        job.numbers[0], between.jobs[0] = 0, (job, 0)

        class Writer:
            def prepare(self) -> None: ...

            def write(self) -> None:
                written.append(time.monotonic())

        job.writer = Writer()

        def give(end: str | None = None) -> int:
            between._take([Update(0, (Drawn(1),), end)])
            return len(written)

        assert [give(), give(), give()] == [1, 2, 2]  # the first token; the first writing; what waits for the second
        await asyncio.sleep(0.04)
        assert give() == 2
        await asyncio.sleep(0.08)  # the wait began with the writing, not with the last update
        assert len(written) == 3
        assert give("length") == 4

    asyncio.run(main())


def test_events_of_several_tokens_and_choices(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes within JOIN is one event for each choice."""
    monkeypatch.setattr(exchange, "JOIN", 0.3)
    events = list(client.completions.create(model="tiny", prompt="añb", max_tokens=60, n=2, stream=True))
    assert len(events) < 20
    for index in range(2):
        choices = [choice for event in events for choice in event.choices if choice.index == index]
        assert "".join(choice.text for choice in choices) == "añb" * 15
        assert [token for choice in choices for token in choice.model_extra["tokens"]] == list("añb".encode()) * 15


@st.composite
def bodies(draw: st.DrawFn) -> Any:
    """Bodies that are nearly right, and any JSON."""
    anything = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=5,
    )
    right: dict[str, Any] = {
        "prompt": draw(st.sampled_from(["ab", ["a", "b"], [1, 2], [[1], [2]], "", [], None])),
        "messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "n": 2, "temperature": 0.5, "top_p": 0.5,
        "top_k": 2, "min_p": 0.1, "seed": -1, "stop": ["b"], "stream": draw(st.booleans()), "logprobs": 1,
        "top_logprobs": 1, "echo": draw(st.booleans()), "stream_options": {}, "repetition_penalty": 1.1,
        "model": "tiny", "user": "x", "tools": [], "ignore_eos": True, "logit_bias": {},
    }  # fmt: skip
    names = list(right)
    body = {name: right[name] for name in draw(st.sets(st.sampled_from(names), max_size=5))}
    for name in draw(st.sets(st.sampled_from(names), max_size=2)):
        body[name] = draw(anything)
    return draw(st.sampled_from([body] * 9 + [draw(anything)]))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(bodies(), st.sampled_from(["completions", "chat/completions"]))
def test_no_body_makes_the_server_fail(live: Live, body: Any, path: str) -> None:
    done = live.http.post(f"/v1/{path}", content=json.dumps(body), headers={"content-type": "application/json"})
    assert done.status_code in (200, 400, 404), done.text
    if done.status_code != 200:
        assert done.json()["error"]["message"]


class Process:
    """`subquad serve` as users run it."""

    def __init__(self, folder: Path, *words: str):
        command = [sys.executable, "-m", "subquad.cli", "serve", str(folder), "--port", "0", "--device", "cpu", *words]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "COLUMNS": "200"}
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        assert "http://" in self.said, self.said + self.process.stdout.read()
        self.http = httpx.Client(base_url=self.said.split()[-1], timeout=120)

    def ask(self, **body: Any) -> dict[str, Any]:
        until(self._listens)
        done: dict[str, Any] = self.http.post("/v1/completions", json=body).json()
        return done

    def _listens(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def end(self, sign: int) -> int:
        self.process.send_signal(sign)
        assert self.process.stdout is not None
        self.said += self.process.stdout.read()
        self.process.stdout.close()
        self.http.close()
        return self.process.wait()


def test_a_process_is_killed_restarts_with_its_cache_and_drains(folder: Path, tmp_path: Path) -> None:
    words = ("--slots", "4", "--cache-gb", "0.1", "--cache-dir", str(tmp_path / "cache"), "--drain", "120")
    prompt = "A long prompt, which is read once. " * 20
    served = Process(folder, *words)
    try:
        model = LanguageModel.load(folder)
        first = served.ask(prompt=prompt, max_tokens=30, temperature=0)
        expected = model.generate([list(prompt.encode())], 30, temperature=0, stop=0)[0].tolist()
        tokens = first["choices"][0]["tokens"]
        assert tokens == expected[: len(tokens)]
        assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        until(lambda: served.http.get("/stats").json()["cache"]["files"] == 5)
    finally:
        assert served.end(signal.SIGKILL) == -signal.SIGKILL
    served = Process(folder, *words)
    try:
        again = served.ask(prompt=prompt, max_tokens=30, temperature=0)
        assert again["choices"][0]["tokens"] == tokens
        assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 512}
        body = {"prompt": "my secret", "max_tokens": 3000, "stream": True, "ignore_eos": True}
        with served.http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(f"{served.http.base_url}/health").status_code == 503)
            refused = httpx.post(f"{served.http.base_url}/v1/completions", json={"prompt": "a"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
            events = [json.loads(line[6:]) for line in lines if line and line != "data: [DONE]"]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    finally:
        status = served.end(signal.SIGTERM)
    assert status == 0, served.said
    assert "made=3000" in served.said
    assert "secret" not in served.said
