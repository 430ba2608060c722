"""Threads for compiled loops: Python's own, over functions that release its lock.

Numba's parallel loops would double the time of compilation, bring a threading layer
whose speed at short work differs several times between machines, and start as many
threads as BLAS has beside them. A thread that waits here takes nothing.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial

WORTH_A_THREAD = 2**16  # numbers: to wake a thread for fewer costs more than it saves


def cores():
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run(jobs, numbers, threads=None):
    """Call every job, in as many threads as `numbers` numbers are worth.

    jobs : callables without arguments; a thread takes the next one until none is left.
    threads : at most so many; None: one for each core.
    """
    count = max(min(threads or cores(), numbers // WORTH_A_THREAD, len(jobs)), 1)
    rest = iter(jobs)  # gives each job to one thread only
    others = [_pool(count).submit(_work, rest) for _ in range(count - 1)]
    _work(rest)
    for other in others:
        other.result()


def in_parts(n, loop, *arguments, size, threads=None):
    """loop(first, last, *arguments) over 0 .. n - 1, each of `size` numbers.

    About four parts for each thread: one that has to wait leaves its share to others.
    """
    most = 4 * (threads or cores()) if threads != 1 else 1
    part = max(-(-n // most), 2 * WORTH_A_THREAD // size, 1)
    jobs = [
        partial(loop, first, min(first + part, n), *arguments)
        for first in range(0, n, part)
    ]
    run(jobs, n * size, threads)


def _work(jobs):
    for job in jobs:
        job()


@lru_cache(maxsize=4)
def _pool(threads):
    """Threads that wait for work: to start them would cost more than short contexts."""
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="kvq")
