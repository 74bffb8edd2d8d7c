import pytest

from subquad.measure import share
from subquad.measure.share import block_share


def test_every_length_has_the_median_share_of_the_samples_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((50.0, 60.0, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0) * 4)  # mixer, block, mixer, ...
    monkeypatch.setattr(share, "once", lambda *_: next(times))
    found = block_share(("softmax", "linear"), lengths=(16, 64), dim=16, heads=2, repeats=3)
    assert found["kind"] == "share"
    assert [(r["mechanism"], r["length"]) for r in found["rows"]] == [
        (name, length) for name in ("softmax", "linear") for length in (16, 64)
    ]
    for row in found["rows"]:
        assert (row["mixer_ms"], row["block_ms"], row["share"]) == (3.0, 4.0, 0.5)
    assert next(times, None) is None
    assert found["settings"]["dim"] == 16


def test_the_mixer_is_timed_on_what_the_block_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def once(run, *_):  # type: ignore[no-untyped-def]
        run()
        ran.append(type(run.func).__name__)
        return 1.0

    monkeypatch.setattr(share, "once", once)
    block_share(("linear",), lengths=(16,), dim=16, heads=2, repeats=2)
    assert ran == ["Linear", "Block"] * 3
