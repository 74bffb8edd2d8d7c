"""Text and tokens: whole characters, stop texts, tokenizers, chat templates."""

import asyncio
import functools
import itertools
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subquad.models import LanguageModel
from subquad.serve import server
from subquad.serve.body import Refused
from subquad.serve.choice import Choice
from subquad.serve.request import Drawn
from subquad.serve.settings import ServeSettings
from subquad.serve.vocabulary import Bytes, Numbers, Vocabulary, _TextDecoder, render_template, vocabulary_of
from tests.serve.scripted import Scripted

SMALL: dict[str, Any] = {"dim": 8, "depth": 1, "heads": 2, "mechanism": "linear"}
TEXT = st.text(st.sampled_from("aabñ€😀"), max_size=30)


def in_pieces(choice: Choice, tokens: list[int], cuts: list[int]) -> tuple[str, list[int]]:
    """What a client gets if the engine's updates end at these places."""
    text, given_tokens = "", []
    places = sorted({cut % (len(tokens) + 1) for cut in cuts} | {0, len(tokens)})
    for begin, end in itertools.pairwise(places):
        part = [Drawn(token) for token in tokens[begin:end]]
        ended = choice.push(part, "length" if end == len(tokens) else None)
        if (piece := choice.take()) is not None:
            text += piece.text
            given_tokens += [one.token for one in piece.drawn]
        if ended:
            break
    return text, given_tokens


@given(
    TEXT,
    st.lists(st.text(st.sampled_from("abñ"), min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(0), max_size=9),
)
def test_texts_end_before_the_first_stop_text_in_any_pieces(text: str, stop: list[str], cuts: list[int]) -> None:
    choice = Choice(0, Bytes(256), tuple(stop), ())
    written, tokens = in_pieces(choice, list(text.encode()), cuts)
    # the stop text that is complete first counts; of several that are complete at once, the one that begins first
    ends = [text.find(one) + len(one) for one in stop if one in text]
    first = min(ends, default=len(text))
    begins = [text[:first].find(one) for one in stop if one in text[:first]]
    assert written == text[: min(begins, default=len(text))]
    assert bytes(tokens) == written.encode()
    if text:
        assert choice.finish == ("stop" if ends else "length")


def test_characters_are_held_until_they_are_whole() -> None:
    choice = Choice(0, Bytes(256), (), ())
    said = []
    for byte in "€b".encode():
        choice.push([Drawn(byte)], None)
        said.append(piece.text if (piece := choice.take()) else None)
    assert said == ["", "", "€", "b"]
    choice.push([Drawn(0xE2)], "length")
    assert choice.take() == ("\N{REPLACEMENT CHARACTER}", [Drawn(0xE2)], [2])


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with a byte-level tokenizer, which has a merge, an end token and a chat template."""
    tokenizers = pytest.importorskip("tokenizers")
    folder: Path = tmp_path_factory.mktemp("tokenized")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: number for number, char in enumerate(alphabet)} | {"th": 256, "<|end|>": 257}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("t", "h")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    made.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    LanguageModel(vocab=258, **SMALL).save(folder)
    return folder


def test_a_folder_with_a_tokenizer(tokenized: Path) -> None:
    found = vocabulary_of(tokenized, LanguageModel.load(tokenized), {}, None)
    assert (found.kind, found.ends) == ("text", (257,))
    text = "the €😀 path"
    tokens = found.encode(text)
    assert len(tokens) == len(text.encode()) - 2  # "th" twice
    assert b"".join(map(found.bytes_of, tokens)) == text.encode()
    choice = Choice(0, found, ("pa",), found.ends)
    assert in_pieces(choice, tokens, [1, 3, 5, 6]) == ("the €😀 ", tokens[:-3])
    decoder = found.decoder()
    assert "".join([*map(decoder.push, [*tokens, 257, *found.encode("€")[:2]]), decoder.flush()]) == text + "\ufffd"
    assert found.render([{"role": "user", "content": "th"}]) == [256, 257, *found.encode(">")]
    assert "subquad" in pytest.importorskip("transformers").CONFIG_MAPPING  # otherwise it warns of config.json
    with pytest.raises(ValueError, match="at most 200, the tokens of the model"):
        vocabulary_of(tokenized, LanguageModel(vocab=200, **SMALL), {}, None)


@functools.cache
def crossing() -> Any:
    """A byte-level tokenizer with tokens that hold the end of one character and the beginning of the next."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    letter = import_module("transformers.convert_slow_tokenizer").bytes_to_unicode()
    merges = [(b"\xe3", b"\x83"), (b"\xbc", b"\xe3\x83"), (b"\x9f", b"\x98"), (b"\x80", b"\xf0")]
    pairs = [tuple("".join(letter[byte] for byte in part) for part in pair) for pair in merges]
    vocab = {name: number for number, name in enumerate([*alphabet, *map("".join, pairs)])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=pairs))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def falling_back() -> Any:
    """A tokenizer of words, with a token for each byte of what is no word."""
    tokenizers = pytest.importorskip("tokenizers")
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁", "a"]
    vocab = {name: number for number, name in enumerate(names)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    parts = tokenizers.decoders
    made.decoder = parts.Sequence(
        [parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(content=" ", left=1)]
    )
    return pytest.importorskip("transformers").PreTrainedTokenizerFast(tokenizer_object=made)


def decoded(tokenizer: Any, tokens: list[int], fallback: dict[int, bytes] | None = None) -> list[str]:
    """What a decoder gives token by token, and at the end."""
    decoder = _TextDecoder(tokenizer, frozenset(), fallback or {})
    return [*map(decoder.push, tokens), decoder.flush()]


def test_characters_whose_bytes_lie_in_several_tokens_are_written_as_soon_as_they_are_whole() -> None:
    tokenizer = crossing()
    tokens = tokenizer.encode("ー" * 40)
    assert len(tokens) == 41  # each but the last ends within a character
    assert decoded(tokenizer, tokens) == ["", *["ー"] * 40, ""]
    first, *rest = tokenizer.encode("ー")
    invalid = tokenizer.convert_tokens_to_ids("Ģ")  # a byte that continues a character
    assert "".join(decoded(tokenizer, [invalid, invalid, first, *rest])) == "\ufffd\ufffdー"
    assert "".join(decoded(tokenizer, [first, first, *rest])) == "\ufffdー"
    assert decoded(tokenizer, [invalid] * 30) == ["", *["\ufffd"] * 30]


@given(st.text("aー😀\N{REPLACEMENT CHARACTER}", max_size=40), st.lists(st.integers(0, 259), max_size=40))
def test_any_tokens_are_written_as_their_tokenizer_writes_them_together(text: str, noise: list[int]) -> None:
    tokenizer = crossing()
    for tokens in (tokenizer.encode(text), noise):
        assert "".join(decoded(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_tokens_of_single_bytes() -> None:
    tokenizer = falling_back()
    the, space, a = (tokenizer.convert_tokens_to_ids(name) for name in ("▁the", "▁", "a"))
    fallback = {number + 1: bytes([number]) for number in range(256)}
    bar = [byte + 1 for byte in "ー".encode()]
    assert decoded(tokenizer, [the, *bar, *bar, the, a], fallback) == [
        "the",
        "",
        "",
        "ー",
        "",
        "",
        "ー",
        " the",
        "a",
        "",
    ]
    assert decoded(tokenizer, [the, 256, *bar, bar[0], a, space, a], fallback) == [
        "the", "\ufffd", "", "", "ー", "", "\ufffda", " ", "a", "",
    ]  # fmt: skip
    assert decoded(tokenizer, [a, *bar[:2]], fallback) == ["a", "", "", "\ufffd"]
    long = bar * 20
    assert "".join(decoded(tokenizer, [a, *long, the], fallback)) == tokenizer.decode([a, *long, the])


@pytest.mark.parametrize(
    "template", ["{{ messages[0].x.y }}", "{{ raise_exception('no') }}", "{% if %}", "{{ 1 / 0 }}"]
)
def test_templates_that_fail_are_the_clients_error(template: str) -> None:
    with pytest.raises(ValueError, match="chat template"):
        render_template(template, [{"role": "user", "content": "a"}])


def test_templates_reach_nothing_outside() -> None:
    with pytest.raises(ValueError, match="unsafe"):
        render_template("{{ messages.__class__.__mro__ }}", [{"role": "user", "content": "a"}])


def serve_in_memory(folder: Path, *bodies: dict[str, Any]) -> list[httpx.Response]:
    """Answers of a server without sockets, and /v1/models at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "Engine", Scripted)
        service = server.make_service(str(folder), ServeSettings(cache_gb=0.0, device="cpu", log_prompts=True))

    async def main() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=service.app())
        async with service.lifespan(transport.app), httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            answers = [await http.post("/v1/completions", json=body) for body in bodies]
            return [*answers, await http.get("/v1/models")]

    return asyncio.run(main())


def test_an_image_model_takes_and_gives_tokens(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LanguageModel(vocab=17, positions="grid", shape=(4, 4), max_length=16, **SMALL).save(tmp_path / "images")
    bodies = [{"prompt": [16, 3, 5], "max_tokens": 4}, {"prompt": "3 5"}, {"prompt": ""}, {"prompt": "3 17"}]
    first, second, empty, wrong, models = serve_in_memory(tmp_path / "images", *bodies)
    (choice,) = first.json()["choices"]
    assert (choice["text"], choice["tokens"]) == (" 16 3 5 16", [16, 3, 5, 16])
    assert second.json()["choices"][0]["tokens"][:3] == [3, 5, 3]
    assert empty.json()["choices"][0]["tokens"] == [16] * 16  # as many as there are positions
    assert wrong.status_code == 400
    about = models.json()["data"][0]["subquad"]
    assert about["image"] == {"rows": 4, "columns": 4, "channels": 1, "shades": 16, "tokens": 16}
    assert (about["start"], about["longest"], about["writes"]) == (16, 17, "images")  # the start and 16 pixels


def test_what_models_write() -> None:
    music = LanguageModel(vocab=48, max_length=64, **SMALL)
    notes = vocabulary_of(Path("nowhere"), music, {"task": "music"}, None)
    assert (notes.kind, notes.start, notes.never) == ("music", 47, (47,))
    speech = LanguageModel(vocab=256, max_length=64, **SMALL)
    sound = vocabulary_of(Path("nowhere"), speech, {"task": "music"}, None)
    assert (sound.start, sound.never) == (128, ())
    few: Vocabulary = vocabulary_of(Path("nowhere"), LanguageModel(vocab=9, **SMALL), {}, None)
    assert isinstance(few, Numbers)
    assert few.encode("3 1 4") == [3, 1, 4]
    with pytest.raises(ValueError, match="none for a model of music"):
        vocabulary_of(Path("nowhere"), music, {"task": "music"}, Path(__file__))
    assert Refused(503, "x").content()["error"]["type"] == "server_error"
