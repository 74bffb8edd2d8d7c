"""A linearised Llama behind the server: what it promises holds for the states of a model of transformers."""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra: pip install 'subquad[hf]'")
pytest.importorskip("starlette", reason="needs the extra: pip install 'subquad[serve]'")

from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import subquad.hf
from subquad import LanguageModel
from subquad.hf import Decoder, byte_tokenizer
from subquad.models.state import size
from subquad.serve.cache import PrefixCache
from subquad.serve.engine import Engine
from subquad.serve.request import Request
from subquad.serve.server import make_service
from subquad.serve.settings import ServeSettings
from tests.serve.test_engine import GREEDY, SAMPLINGS, answers
from tests.serve.test_http import Live

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
PROMPT = "The sea was grey and the ships lay still. " * 8


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, eos_token_id=0, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    folder: Path = tmp_path_factory.mktemp("models") / "teacher"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def student(teacher: Path) -> Path:
    """The teacher with two linear layers and a window beside a third: what `subquad linearise` writes, untrained."""
    model = AutoModelForCausalLM.from_pretrained(teacher)
    torch.manual_seed(1)
    subquad.hf.replace(model, [1], "gated_deltanet", expand_v=1)
    subquad.hf.replace(model, [3], "linear", exact_window=6, feature_map="hedgehog")
    folder = teacher.parent / "student"
    model.generation_config.eos_token_id = [0, 255]
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / file).write_bytes((teacher / file).read_bytes())
    return folder


@pytest.fixture(scope="module")
def ours(student: Path) -> Decoder:
    return Decoder.load(student)


def requests_of(count: int, seed: int, **fields: Any) -> list[Request]:
    """Prompts that begin alike, in part."""
    rng = random.Random(seed)
    start = [rng.randrange(256) for _ in range(40)]
    cuts = [rng.randrange(41) for _ in range(count)]
    tails = [[rng.randrange(256) for _ in range(rng.randrange(1, 9))] for _ in range(count)]
    return [
        Request(prompt=tuple(start[:cut] + tail), steps=6, seed=n, **fields)
        for n, (cut, tail) in enumerate(zip(cuts, tails, strict=True))
    ]


def test_text_is_the_same_alone_and_together_with_the_cache_on_off_and_evicted(ours: Decoder, tmp_path: Path) -> None:
    """Log-probabilities too, bit by bit; also from states that came back from disk."""
    few = 3 * size(ours.init_state(1, 32))
    caches = {
        "off": None,
        "on": PrefixCache.of(ours, 1 << 24, every=8),
        "small": PrefixCache.of(ours, few, every=8),
        "disk": PrefixCache.of(ours, few, every=8, folder=tmp_path / "cache", folder_limit=1 << 24),
    }
    engines = {name: Engine(ours, slots=4, capacity=64, piece=8, cache=cache) for name, cache in caches.items()}
    alone = Engine(ours, slots=4, capacity=64, piece=8)
    for seed in range(6):
        requests = requests_of(5, seed // 2, sampling=GREEDY, logprobs=2)
        expected = [answers(alone, [request])[0] for request in requests]
        for name, engine in engines.items():
            assert answers(engine, requests) == expected, (name, seed)
    on, small, disk = (cache.stats for cache in caches.values() if cache is not None)
    assert on.hits > 10
    assert on.evicted == 0
    assert small.evicted > 10
    assert disk.loaded > 0
    caches["disk"].close()
    again = PrefixCache.of(ours, 1 << 24, every=8, folder=tmp_path / "cache", folder_limit=1 << 24)
    engine = Engine(ours, slots=4, capacity=64, piece=8, cache=again)
    assert answers(engine, requests) == expected
    assert again.stats.loaded > 0
    again.close()


def test_pieces_of_several_prompts_in_one_call(ours: Decoder) -> None:
    """As on a GPU: bit by bit the same in any company, and up to rounding as if each were read alone."""
    requests = requests_of(7, 3, sampling=GREEDY, logprobs=0)
    together = answers(Engine(ours, slots=6, capacity=64, piece=8, abreast=4), requests)
    alone = Engine(ours, slots=6, capacity=64, piece=8, abreast=4)
    assert [answers(alone, [request])[0] for request in requests] == together
    for (a, _), (b, _) in zip(together, answers(Engine(ours, slots=6, capacity=64), requests), strict=True):
        assert [one.token for one in a] == [one.token for one in b]
        torch.testing.assert_close(*(torch.tensor([one.logprob for one in row]) for row in (a, b)))


@pytest.mark.parametrize("draft", [False, True])
def test_each_request_has_its_own_sampling(ours: Decoder, teacher: Path, draft: bool) -> None:
    """With a draft model too, here the teacher, which guesses wrong, and the model itself, which guesses right."""
    requests = [
        Request(prompt=request.prompt, steps=8, seed=n, sampling=SAMPLINGS[n % len(SAMPLINGS)])
        for n, request in enumerate(requests_of(6, 7))
    ]
    for guesser in (Decoder.load(teacher), ours) if draft else (None,):
        engine = Engine(ours, slots=4, capacity=64, piece=8, draft=guesser, ahead=3)
        for request, (drawn, _) in zip(requests, answers(engine, requests), strict=True):
            alone = ours.generate(request.prompt, 8, sampling=request.sampling, seed=request.seed)
            assert [one.token for one in drawn] == alone.tolist()
        if draft:
            assert engine.stats.drafted > 0
    assert not draft or engine.stats.accepted > 0


@pytest.fixture(scope="module")
def live(student: Path) -> Iterator[Live]:
    found = Live(make_service(str(student), ServeSettings(device="cpu", slots=4, capacity=600)))
    yield found
    found.stop()


def test_completions_are_what_their_generate_writes(live: Live, student: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(student).eval()
    for prompt in (PROMPT, PROMPT + "The", "a"):  # the second one continues from the cache
        ids = torch.tensor([list(prompt.encode())])
        wanted = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[0]
        done = live.post("/v1/completions", prompt=prompt, max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
        body = done.json()
        tokens = body["choices"][0]["tokens"]
        assert tokens[: wanted.shape[0] - ids.shape[1]] == wanted[ids.shape[1] :].tolist()
        with torch.no_grad():
            logits = theirs(torch.cat((ids[0], torch.tensor(tokens)))[None]).logits[0, ids.shape[1] - 1 : -1]
        scores = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        given = torch.tensor(body["choices"][0]["logprobs"]["token_logprobs"])
        torch.testing.assert_close(given, scores, rtol=1e-3, atol=1e-3)
    assert live.http.get("/stats").json()["cache"]["hits"] == 1


def test_chat_stop_and_what_is_told_about_the_model(live: Live) -> None:
    words = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    messages = [{"role": "user", "content": "The sea?"}]
    chat = live.post("/v1/chat/completions", messages=messages, **words).json()["choices"][0]
    plain = live.post("/v1/completions", prompt="user: The sea?\nassistant: ", **words).json()["choices"][0]
    assert chat["message"]["content"] == plain["text"]
    stop = plain["text"][2]
    cut = live.post("/v1/completions", prompt="user: The sea?\nassistant: ", stop=stop, **words).json()["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (plain["text"][: plain["text"].index(stop)], "stop")
    about = live.http.get("/v1/models").json()["data"][0]
    model = about["subquad"]
    assert about["id"] == "student"
    assert model["mechanisms"] == ["softmax", "gated_deltanet", "linear", "local"]
    assert model["chat"]
    assert model["ends"] == [0, 255]  # the tokenizer's, and that of generation_config.json
    assert model["kv_bytes_per_token"] == 4 * 2 * 16 * 4  # four layers, two heads of eight numbers
    grown = model["state_bytes"] - model["state_bytes_first"]
    assert 0.5 * 600 * model["kv_bytes_per_token"] <= grown < 0.6 * 600 * model["kv_bytes_per_token"]  # of two layers


def test_a_folder_needs_a_tokenizer(student: Path, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((student / file).read_bytes())
    with pytest.raises(ValueError, match=r"has no tokenizer: accepted is a folder with one of tokenizer\.json"):
        make_service(str(tmp_path), ServeSettings(device="cpu"))


def test_models_of_ours_are_served_without_transformers(tmp_path: Path) -> None:
    LanguageModel(vocab=256, dim=16, depth=1, heads=2, mechanism="linear", positions="none").save(tmp_path / "model")
    program = (
        "import sys; from subquad.serve.server import make_service; from subquad.serve.settings import ServeSettings;"
        f" make_service({str(tmp_path / 'model')!r}, ServeSettings(device='cpu'));"
        " assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
