import pytest

from subquad import machine as provenance


def test_the_environment_variable_comes_before_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(provenance.COMMIT, raising=False)
    answers = {"rev-parse": "0123456789ab", "status": ""}
    monkeypatch.setattr(provenance, "_git", lambda *words: answers[words[0]] or None)
    assert provenance.commit() == "0123456789ab"
    answers["status"] = " M models/taps.py"
    assert provenance.commit() == "0123456789ab-dirty"
    answers["rev-parse"] = ""
    assert provenance.commit() is None
    monkeypatch.setenv(provenance.COMMIT, "here so that it is undone")
    provenance.tell_commit(None)
    provenance.tell_commit("abc")
    assert provenance.commit() == "abc"
