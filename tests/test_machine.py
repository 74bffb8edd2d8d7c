from subquad.machine import free_bytes


def test_free_memory_is_known() -> None:
    assert free_bytes("cpu") > 0
