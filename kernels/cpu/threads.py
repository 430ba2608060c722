"""Threads for compiled loops: Python's own, over functions that release its lock.

Numba's parallel loops would double the time of compilation, bring a threading layer
whose speed at short work differs several times between machines, and start as many
threads as BLAS has beside them. A thread that waits here takes nothing.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial

WORTH_A_THREAD = 200e-6  # seconds of work: to wake a thread for less gains nothing
SECONDS_OF_A_NUMBER = 1e-9  # to pack it, or to unpack it


def cores():
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worth(seconds, threads=None):
    """How many threads to use for what takes one of them `seconds`, roughly.

    threads : at most so many; None: one for each core.
    """
    return max(min(threads or cores(), int(seconds / WORTH_A_THREAD)), 1)


def run(jobs, threads):
    """Call every job: callables without arguments; a thread takes the next one until
    none is left."""
    rest = iter(jobs)  # gives each job to one thread only
    others = [_pool(threads).submit(_work, rest) for _ in range(threads - 1)]
    _work(rest)
    for other in others:
        other.result()


def in_parts(n, loop, *arguments, size, threads=None):
    """loop(first, last, *arguments) over 0 .. n - 1, each of `size` numbers.

    Four parts for each thread: one that has to wait leaves its share to others.
    """
    count = worth(n * size * SECONDS_OF_A_NUMBER, threads)
    part = max(-(-n // (4 * count if count > 1 else 1)), 1)
    jobs = [
        partial(loop, first, min(first + part, n), *arguments)
        for first in range(0, n, part)
    ]
    run(jobs, count)


def _work(jobs):
    for job in jobs:
        job()


@lru_cache(maxsize=4)
def _pool(threads):
    """Threads that wait for work: to start them would cost more than short contexts."""
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="kvq")
