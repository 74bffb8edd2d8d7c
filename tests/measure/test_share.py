from subquad.measure.share import block_share


def test_every_length_has_a_share_of_its_block() -> None:
    found = block_share(("softmax", "linear"), lengths=(16, 64), dim=16, heads=2, repeats=3)
    assert found["kind"] == "share"
    assert [(r["mechanism"], r["length"]) for r in found["rows"]] == [
        (name, length) for name in ("softmax", "linear") for length in (16, 64)
    ]
    for row in found["rows"]:
        assert 0 < row["share"] <= 1
        assert row["mixer_ms"] > 0
        assert row["block_ms"] > 0
    assert found["settings"]["dim"] == 16
