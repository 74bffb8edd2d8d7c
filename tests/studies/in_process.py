"""Measure in this process; `compare` would start another process."""

from collections.abc import Iterator, Sequence

from subquad.measure.cost import Row
from subquad.studies.compare_worker import Bench, Event, Job
from subquad.studies.settings import Settings


def work(settings: Settings, jobs: Sequence[Job], rows: Sequence[Row]) -> Iterator[Event]:
    bench = Bench(settings, rows)
    for job in jobs:
        yield {"begin": job}
        yield bench.do(job)
