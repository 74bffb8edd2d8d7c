import gc
import signal

import pytest

# a shell's background job and nohup ignore these signals, and processes that tests start would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported and collected stays for good: measuring collects garbage often, and need not search it.

    With many tests this includes what some of them import later.
    """
    if len(session.items) > 1000:
        import matplotlib.pyplot  # noqa: F401
        import torch._dynamo  # noqa: F401
    gc.collect()
    gc.freeze()
