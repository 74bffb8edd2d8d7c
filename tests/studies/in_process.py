"""Measure in this process, and each thing once; `compare` would start another process."""

import dataclasses
from collections.abc import Iterator, Sequence

from subquad.measure.cost import Row
from subquad.studies.compare_worker import Bench, Event, Job
from subquad.studies.settings import Settings


def work(settings: Settings, jobs: Sequence[Job], rows: Sequence[Row]) -> Iterator[Event]:
    bench = Bench(dataclasses.replace(settings, repeats=1), rows)
    for job in jobs:
        yield {"begin": job}
        yield bench.do(job)
