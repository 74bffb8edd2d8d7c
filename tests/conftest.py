import gc

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported and collected stays for good: measuring collects garbage often, and need not search it."""
    gc.collect()
    gc.freeze()
