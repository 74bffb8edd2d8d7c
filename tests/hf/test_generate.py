"""generate() of transformers over our states: against our own generate, and against loops that have no cache."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra: pip install 'subquad[hf]'")

from transformers import AutoModelForCausalLM, DynamicCache, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import subquad
from subquad.hf import SubquadCache, unwrap, wrap
from subquad.mechanisms import MECHANISMS
from subquad.models import Classifier, LanguageModel
from subquad.models.sampling import Sampling, adjust
from tests.hf.tiny import KINDS, VOCAB, make, padded

CASES = 100
STEPS = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[LanguageModel, Any]]:
    """Each kind's own model, and the same from its folder."""
    made = {}
    for number, kind in enumerate(KINDS):
        folder = tmp_path_factory.mktemp("model")
        model = make(kind, number)
        model.save(folder)
        made[kind] = (model, AutoModelForCausalLM.from_pretrained(folder))
    return made


def draw_plainly(model: LanguageModel, rows: list[Tensor], sampling: Sampling, seed: int) -> Tensor:
    """Sampling without padding or cache: the whole row each time, our filters, torch's draw."""
    torch.manual_seed(seed)
    rows = [row.clone() for row in rows]
    for _ in range(STEPS):
        with torch.no_grad():
            logits = torch.stack([model(row[None])[0, -1] for row in rows])
        drawn = torch.multinomial(adjust(logits, sampling).softmax(-1), 1)
        rows = [torch.cat((row, new)) for row, new in zip(rows, drawn, strict=True)]
    return torch.stack([row[-STEPS:] for row in rows])


def one_by_one(theirs: Any, rows: list[Tensor], **options: Any) -> Tensor:
    """transformers' generate without padding or cache."""
    parts = [theirs.generate(row[None], max_new_tokens=STEPS, use_cache=False, **options) for row in rows]
    return torch.cat([part[:, len(row) :] for part, row in zip(parts, rows, strict=True)])


@pytest.mark.parametrize("number", range(CASES))
def test_the_same_tokens_as_without_cache_and_padding(
    number: int, models: dict[str, tuple[LanguageModel, Any]]
) -> None:
    """A random case of {state} x {greedy, sampled, beams} x {padding side} x {batch} x {sequences of a prompt}."""
    chance = random.Random(number)
    kind, how = list(KINDS)[number % len(KINDS)], ("greedy", "sampled", "beams")[number // len(KINDS) % 3]
    ours, theirs = models[kind]
    torch.manual_seed(number)
    rows = [torch.randint(VOCAB, (chance.randint(1, 12),)) for _ in range(chance.randint(1, 4))]
    ids, mask = padded(rows, chance.choice(("left", "right")))
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": STEPS}
    if chance.random() < 0.3:
        options["prefill_chunk_size"] = chance.randint(1, 5)
    if how == "greedy":
        wanted = ours.generate([row.tolist() for row in rows], STEPS, temperature=0)
        options["do_sample"] = False
    elif how == "sampled":
        filters = {"temperature": chance.uniform(0.5, 1.5), "top_k": chance.randint(5, VOCAB), "top_p": 0.9}
        each = chance.randint(1, 3)
        wanted = draw_plainly(ours, [row for row in rows for _ in range(each)], Sampling(**filters), number)
        options |= {"do_sample": True, "num_return_sequences": each, **filters}
    else:
        beams = chance.randint(2, 4)
        search = {"num_beams": beams, "num_return_sequences": chance.randint(1, beams), "do_sample": False}
        wanted = one_by_one(theirs, rows, **search)
        options |= search
    torch.manual_seed(number)
    found = theirs.generate(ids, **options)[:, ids.shape[1] :]
    assert torch.equal(found, wanted), (kind, how)


@pytest.mark.parametrize("name", [name for name, cls in MECHANISMS.items() if cls.traits.causal])
def test_every_mechanism_generates_from_its_folder(name: str, tmp_path: Path) -> None:
    """So what is not saved, such as buffers, is there; and cropping equals never having read."""
    for number, options in enumerate(MECHANISMS[name].small):
        if "layer" in options or "sortcut" in options:
            continue  # the model sets the layer; sortcut is bidirectional
        torch.manual_seed(number)
        model = LanguageModel(vocab=VOCAB, dim=16, depth=2, heads=4, mechanism=(name, options), max_length=40).eval()
        model.save(tmp_path)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
        rows = [torch.randint(VOCAB, (size,)) for size in (4, 13)]
        ids, mask = padded(rows, "left")
        wanted = model.generate([row.tolist() for row in rows], 7, temperature=0)
        found = theirs.generate(ids, attention_mask=mask, max_new_tokens=7, do_sample=False)
        assert torch.equal(found[:, 13:], wanted), options
        cache = theirs.make_cache()
        if cache.is_croppable:
            with torch.no_grad():
                theirs(ids, attention_mask=mask, past_key_values=cache)
                theirs(torch.randint(VOCAB, (2, 5)), past_key_values=cache)
                cache.crop(-5)
                again = theirs(ids[:, :3], past_key_values=cache).logits
                for row, logits, end in zip(rows, again, ids[:, :3], strict=True):
                    torch.testing.assert_close(logits, model(torch.cat((row, end))[None])[0, -3:])
            assert cache.get_seq_length() == 16


def test_end_of_text_stops_a_row_and_pads_it(models: dict[str, tuple[LanguageModel, Any]]) -> None:
    ours, theirs = models["constant"]
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([5, 6])]
    ids, mask = padded(rows, "left")
    plain = ours.generate([row.tolist() for row in rows], 12, temperature=0)
    stop = int(plain[0, 3])  # so that a row stops early
    wanted = ours.generate([row.tolist() for row in rows], 12, temperature=0, stop=stop, full=True)
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    found = theirs.generate(ids, eos_token_id=stop, pad_token_id=0, **options)[:, 3:]
    assert int(wanted.lengths.min()) <= 4
    for row, length, tokens in zip(found, wanted.lengths, wanted.tokens, strict=True):
        assert row[:length].tolist() == tokens[:length].tolist()
        assert not row[length:].any()


class Kept(BaseStreamer):
    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


class AfterThree(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 6)


def test_streamers_and_stopping_criteria(models: dict[str, tuple[LanguageModel, Any]]) -> None:
    ours, theirs = models["window"]
    streamer = Kept()
    ids = torch.tensor([[3, 1, 4]])
    found = theirs.generate(ids, max_new_tokens=9, do_sample=False, streamer=streamer, stopping_criteria=[AfterThree()])
    wanted = ours.generate([3, 1, 4], 3, temperature=0).tolist()
    assert found[0, 3:].tolist() == wanted
    assert streamer.parts == [[3, 1, 4], *([token] for token in wanted)]
    assert streamer.ended


@pytest.mark.parametrize("kind", ["hybrid", "recomputed"])
def test_a_generation_continues_from_its_cache(kind: str, models: dict[str, tuple[LanguageModel, Any]]) -> None:
    ours, theirs = models[kind]
    ids, mask = padded([torch.tensor([1, 2, 3]), torch.tensor([4])], "left")
    wanted = ours.generate([[1, 2, 3], [4]], 8, temperature=0)
    how = {"do_sample": False, "return_dict_in_generate": True}
    first = theirs.generate(ids, attention_mask=mask, max_new_tokens=3, **how)
    assert isinstance(first.past_key_values, SubquadCache)
    assert first.past_key_values.tokens.tolist() == [5, 3]
    assert first.past_key_values.get_seq_length() == 5  # the last token was drawn, and not read
    seen = torch.cat((mask, torch.ones(2, 3, dtype=torch.int64)), 1)
    branch = copy.deepcopy(first.past_key_values)
    for cache in (first.past_key_values, branch):
        more = theirs.generate(
            first.sequences, attention_mask=seen, max_new_tokens=5, past_key_values=cache, **how
        ).sequences
        assert torch.equal(more[:, 3:], wanted)
    full = theirs.generate(ids, attention_mask=mask, max_new_tokens=3, **how)
    theirs(full.sequences[:, -1:], attention_mask=seen, past_key_values=full.past_key_values)
    with pytest.raises(ValueError, match="nothing that the cache has not read"):
        theirs.generate(full.sequences, attention_mask=seen, max_new_tokens=2, past_key_values=full.past_key_values)


def test_assisted_generation_where_tokens_can_be_taken_back(models: dict[str, tuple[LanguageModel, Any]]) -> None:
    ids = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]])
    options = {"max_new_tokens": 10, "do_sample": False, "prompt_lookup_num_tokens": 3}
    for kind in ("growing", "recomputed"):
        ours, theirs = models[kind]
        assert torch.equal(theirs.generate(ids, **options)[0, 8:], ours.generate(ids[0], 10, temperature=0))
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        models["constant"][1].generate(ids, **options)


def test_the_steps_of_a_cache_equal_the_whole(models: dict[str, tuple[LanguageModel, Any]]) -> None:
    """A cache counts columns and tokens, with padding in later parts too, and its rows can be chosen and repeated."""
    for kind, (ours, theirs) in models.items():
        torch.manual_seed(1)
        ids, mask = torch.randint(VOCAB, (3, 12)), torch.ones(3, 12, dtype=torch.int64)
        mask[0, :4] = mask[1, 5:8] = mask[2, 10:] = 0
        cache, parts, start = theirs.make_cache(), [], 0
        with torch.no_grad():
            for stop in (3, 4, 9, 12):
                output = theirs(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
                parts.append(output.logits)
                start = stop
        logits = torch.cat(parts, 1)
        assert [cache.get_seq_length(n) for n in range(len(cache))] == [12] * len(cache), kind
        assert cache.tokens is not None
        assert cache.tokens.tolist() == [8, 9, 10]
        for b in range(3):
            real = mask[b].bool()
            with torch.no_grad():
                torch.testing.assert_close(logits[b, real], ours(ids[b, real][None])[0], rtol=1e-4, atol=1e-5)
        few = copy.deepcopy(cache)
        few.batch_select_indices(torch.tensor([2, 0]))
        few.batch_repeat_interleave(2)
        few.reorder_cache(torch.tensor([3, 0, 1, 2]))
        assert few.batch_size == 4
        with torch.no_grad():
            after = theirs(torch.full((4, 1), 5), past_key_values=few).logits[:, 0]
            plain = theirs(torch.full((3, 1), 5), past_key_values=cache).logits[:, 0]
        torch.testing.assert_close(after, plain[[0, 2, 2, 0]], rtol=1e-4, atol=1e-5)
        cache.reset()
        assert (cache.get_seq_length(), cache.batch_size) == (0, -1)


def test_what_a_cache_refuses(models: dict[str, tuple[LanguageModel, Any]]) -> None:
    _, theirs = models["constant"]
    _, growing = models["growing"]
    cache, ids = theirs.make_cache(), torch.tensor([[1, 2, 3]])
    theirs(ids, past_key_values=cache)
    for layer in range(2):
        assert cache.get_seq_length(layer) == 3
    with pytest.raises(NotImplementedError, match=r"crop\(-1\) cannot work: layer 0 \(linear\) keeps .* copy.deepcopy"):
        cache.crop(-1)
    cache.crop(0)
    cache.crop(3)
    with pytest.raises(ValueError, match=r"tokens_to_remove=0.5 cannot work: accepted is a negative number"):
        cache.crop(0.5)
    with pytest.raises(ValueError, match=r"layer_idx=7 cannot work: accepted is 0 to 1"):
        cache.get_seq_length(7)
    with pytest.raises(NotImplementedError, match="the model itself advances it"):
        cache.update(torch.zeros(1), torch.zeros(1), 0)
    with pytest.raises(ValueError, match=r"past_key_values is a DynamicCache: accepted is model.make_cache"):
        theirs(ids, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match=r"past_key_values is a DynamicCache"):
        theirs.generate(ids, past_key_values=DynamicCache(), max_new_tokens=1)
    with pytest.raises(ValueError, match="past_key_values has 1 layers: this model has 2"):
        theirs(ids, past_key_values=models["recomputed"][1].make_cache())
    with pytest.raises(ValueError, match="past_key_values has 1 rows on cpu: input_ids has 2"):
        theirs(ids.expand(2, -1), past_key_values=cache)
    with pytest.raises(
        ValueError, match=r"attention_mask has shape \[1, 2\]: accepted is \[1, 4\]: the 3 columns in the"
    ):
        theirs(ids[:, :1], past_key_values=cache, attention_mask=torch.ones(1, 2, dtype=torch.int64))
    cache = growing.make_cache()
    growing(ids, attention_mask=torch.tensor([[0, 1, 1]]), past_key_values=cache)
    cache.crop(-2)
    with pytest.raises(ValueError, match="at least 0: columns before that hold padding"):
        cache.crop(-1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_attentions": True}, r"output_attentions=True cannot work: .* pattern\(x\)"),
        ({"inputs_embeds": torch.zeros(1, 3, 16)}, "inputs_embeds=.* pass input_ids"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, "attention_mask is .* a 4-D mask"),
        ({"attention_mask": torch.tensor([[1, 1, 2]])}, "ranges from 1 to 2: .* packed"),
        ({"attention_mask": torch.ones(1, 5, dtype=torch.int64)}, r"accepted are ones and zeros, \[1, 3\]"),
        ({"position_ids": torch.tensor([[0, 1, 0]])}, "position_ids is .* packed"),
        ({"labels": torch.zeros(1, 2, dtype=torch.int64)}, r"labels has shape \[1, 2\]: accepted is \[1, 3\]"),
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, r"input_ids has shape \[3\]: accepted are token ids"),
        ({"input_ids": torch.tensor([[VOCAB]])}, f"accepted are ids from 0 to {VOCAB - 1}"),
        ({"labels": torch.zeros(1, 3, dtype=torch.int64), "logits_to_keep": 1}, "accepted is 0 with labels"),
    ],
)
def test_what_forward_refuses(
    arguments: dict[str, Any], message: str, models: dict[str, tuple[LanguageModel, Any]]
) -> None:
    with pytest.raises(ValueError, match=message):
        models["constant"][1](**{"input_ids": torch.tensor([[1, 2, 3]]), **arguments})


def test_what_generate_refuses(models: dict[str, tuple[LanguageModel, Any]]) -> None:
    theirs, ids = models["constant"][1], torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match="cache_implementation='static' cannot work"):
        theirs.generate(ids, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match="output_attentions=True cannot work"):
        theirs.generate(ids, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="inputs_embeds"):
        theirs.generate(inputs_embeds=torch.zeros(1, 2, 16), max_new_tokens=2)
    with pytest.raises(ValueError, match="not used by the model: \\['temprature'\\]"):
        theirs.generate(ids, max_new_tokens=2, temprature=0.5)


def test_positions_that_we_count_ourselves_are_accepted(models: dict[str, tuple[LanguageModel, Any]]) -> None:
    ours, theirs = models["growing"]
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    ids, mask = padded(rows, "left")
    given = (mask.cumsum(1) - 1).clamp(min=0)
    plain, told = theirs(ids, attention_mask=mask).logits, theirs(ids, attention_mask=mask, position_ids=given).logits
    assert torch.equal(plain, told)
    torch.testing.assert_close(plain[1, -1], ours(rows[1][None])[0, -1])


def test_hidden_states_and_tuples(models: dict[str, tuple[LanguageModel, Any]]) -> None:
    ours, theirs = models["constant"]
    ids = torch.tensor([[1, 2, 3, 4]])
    output = theirs(ids, output_hidden_states=True, use_cache=False)
    assert [tuple(h.shape) for h in output.hidden_states] == [(1, 4, 16)] * 3
    torch.testing.assert_close(ours._logits(output.hidden_states[-1]), output.logits)
    torch.testing.assert_close(output.hidden_states[0], ours.embedding(ids))
    again = models["recomputed"][1]
    assert (
        len(again(ids, output_hidden_states=True).hidden_states) == 3
    )  # also where a cache reads the tokens once more
    core = Classifier(classes=3, vocab=23, dim=8, depth=2, heads=2, mechanism="linear", pooling="none").eval()
    output = wrap(core)(ids, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    torch.testing.assert_close(core.head(output.hidden_states[-1]), output.logits)
    logits, cache = theirs(ids, return_dict=False)
    assert torch.equal(logits, theirs(ids).logits)
    assert isinstance(cache, SubquadCache)
    torch.testing.assert_close(theirs(ids, logits_to_keep=2).logits, logits[:, -2:])
    torch.testing.assert_close(theirs(ids, logits_to_keep=torch.tensor([0, 3])).logits, logits[:, [0, 3]])
    theirs(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="output_hidden_states=True cannot work: accepted is False with a cache"):
        theirs(ids, past_key_values=cache, output_hidden_states=True)


def test_a_model_of_pixels_draws_from_its_mixture() -> None:
    """Outputs that are a mixture of logistics become logits of the 256 values."""
    torch.manual_seed(0)
    model = subquad.LanguageModel(vocab=257, dim=16, depth=1, heads=2, mechanism="linear", mixture=3).eval()
    theirs, ids = wrap(model), torch.randint(257, (2, 5))
    assert unwrap(theirs) is model
    probabilities = theirs(ids).logits.exp()
    assert probabilities.shape == (2, 5, 256)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 5))
    torch.testing.assert_close(
        theirs(ids.clamp(max=255), labels=ids.clamp(max=255)).loss, model.loss(ids.clamp(max=255))
    )
    found = theirs.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(found[:, 5:], model.generate(ids, 4, temperature=0))
