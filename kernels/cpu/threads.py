"""Threads for compiled loops: Python's own, over functions that release its lock.

Numba's parallel loops would double the time of compilation, bring a threading layer
whose speed at short work differs several times between machines, and start as many
threads as BLAS has beside them. A thread that waits here takes nothing.
"""

import os
from functools import cache, partial
from queue import SimpleQueue
from threading import Thread

WORTH_A_THREAD = 130e-6  # seconds of work: to wake a thread for less gains nothing
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
    most = int(seconds / WORTH_A_THREAD)
    return max(min(threads or cores(), most), 1) if most > 1 else 1


def run(jobs, threads):
    """Call every job: callables without arguments; a thread takes the next one until
    none is left. Raises what one of them raised, after all have come to an end."""
    rest, done = iter(jobs), SimpleQueue()  # `rest` gives each job to one thread only
    for _ in range(threads - 1):
        _helpers(threads - 1).put((rest, done))
    error = _work(rest)
    for _ in range(threads - 1):
        error = done.get() or error
    if error:
        raise error


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
    """Take jobs until none is left; None, or the error of one."""
    try:
        for job in jobs:
            job()
    except Exception as error:
        return error
    return None


# A pool of the standard library takes twice as long until a thread has begun.
@cache
def _helpers(count):
    """Where `count` threads wait for work: to start them would cost more still."""
    requests = SimpleQueue()
    for i in range(count):
        Thread(target=_serve, args=(requests,), name=f"kvq-{i}", daemon=True).start()
    return requests


def _serve(requests):
    while True:
        jobs, done = requests.get()
        done.put(_work(jobs))


if hasattr(os, "register_at_fork"):  # a child has none of its parent's threads
    os.register_at_fork(after_in_child=_helpers.cache_clear)
