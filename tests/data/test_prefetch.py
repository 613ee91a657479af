"""Jobs run ahead, results come in order."""

from __future__ import annotations

import threading
import time

import pytest

from nxdt_core.data.loader import prefetched


def jobs(count, begun):
    def job(number):
        def run():
            time.sleep(0.002 * (number % 3))  # later jobs finish earlier
            return number

        return run

    for number in range(count):
        begun.append(number)
        yield job(number)


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_results_come_in_the_order_of_the_jobs(workers):
    assert list(prefetched(jobs(20, []), workers)) == list(range(20))


def test_without_workers_nothing_runs_ahead():
    begun = []
    results = prefetched(jobs(20, begun), 0)
    next(results)
    assert begun == [0]


def test_no_more_than_two_jobs_a_worker_are_ahead():
    begun = []
    results = prefetched(jobs(20, begun), 2)
    next(results)
    assert len(begun) == 5
    results.close()


def test_jobs_run_beside_the_caller():
    started = threading.Event()
    results = prefetched(iter([lambda: 1, started.set]), 1)
    assert next(results) == 1
    assert started.wait(timeout=60)
    results.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_comes_where_the_result_would_have(workers):
    def fails():
        raise OSError("disk")

    results = prefetched(iter([lambda: 1, fails, lambda: 3]), workers)
    assert next(results) == 1
    with pytest.raises(OSError, match="disk"):
        next(results)
