import dataclasses
import json
from typing import Any

import pytest

from subquad.disk import cache_folder
from subquad.machine import readable
from subquad.mechanisms import MECHANISMS
from subquad.studies.settings import Settings, parse_length, parse_lengths, parse_mechanisms
from subquad.tasks import TRIALS


def test_json_there_and_back() -> None:
    settings = Settings(lengths=(64, 32), mechanisms=("linear",), causal=False, memory=10)
    assert settings.lengths == (32, 64)
    assert settings.mechanisms == ("softmax", "linear")
    assert Settings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    assert settings.to_dict().keys() == {field.name for field in dataclasses.fields(Settings)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": ()}, "lengths="),
        ({"lengths": (0,)}, "lengths="),
        ({"mechanisms": ("linaer",)}, "did you mean 'linear'"),
        ({"dim": 65}, "heads=2 cannot work: accepted is a divisor of dim=65"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"task": "mnist"}, "task='mnist'"),
        ({"task": "copy", "data": "x.npy"}, "name one of the two"),
        ({"task": "copy", "causal": False}, "task='copy' cannot work"),
        ({"device": "abacus"}, "device='abacus'"),
        ({"limit": 0.0}, "limit=0.0"),
        ({"memory": 0}, "memory=0"),
        ({"mechanisms": ()}, "mechanisms=''"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**changes)


def test_each_mechanism_in_the_form_it_has() -> None:
    either = Settings()
    assert either.is_causal("linear")
    assert not either.is_causal("fnet")
    assert Settings(causal=True).is_causal("fnet")
    assert not Settings(causal=False).is_causal("linear")


def test_words_to_values() -> None:
    assert parse_lengths("512, 4k,16K") == (512, 4096, 16384)
    assert (parse_length("16k"), parse_length("16000"), parse_length("1M")) == (16384, 16000, 1048576)
    for wrong in ("512,1024", "many", "", "m", "1g", "k"):
        with pytest.raises(ValueError, match="length="):
            parse_length(wrong)
    assert parse_mechanisms("all") == tuple(MECHANISMS)
    assert parse_mechanisms("linear, local") == ("linear", "local")
    with pytest.raises(ValueError, match="lengths='512,many'"):
        parse_lengths("512,many")
    assert [readable(n) for n in (12, 1234, 5.6e6, 78e9)] == ["12 B", "1.23 kB", "5.6 MB", "78 GB"]


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUBQUAD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(cache_folder()) == "/somewhere/subquad"
    monkeypatch.setenv("SUBQUAD_CACHE", "/elsewhere")
    assert str(cache_folder()) == "/elsewhere"


def test_the_help_names_the_tasks_that_have_a_trial() -> None:
    (task,) = (field for field in dataclasses.fields(Settings) if field.name == "task")
    assert task.metadata["help"].endswith(" on copy, digits or listops.")
    assert list(TRIALS) == ["copy", "digits", "listops"]
