"""How many threads torch takes for an operation, thread by thread."""

from __future__ import annotations

import threading

import torch


def compute_alone(default: int) -> None:
    """Let torch run the operations of the calling thread in this thread only.

    Otherwise the thread's first operation starts OpenMP threads of its own, which stay. As soon as a process has more
    of GNU's OpenMP threads than cores, all of them sleep while they wait for each other, and no longer spin, also those
    of an engine in the same process: a step of vLLM that generates with SmolLM2-135M on two cores takes 35 to 45 ms
    then, in place of 25.

    Args:
        default: number of threads for threads that start later, because they take over what any thread set last.
    """
    torch.get_num_threads()  # or the first operation would take the thread's number from the default
    _set(1)
    keeper = threading.Thread(target=_set, args=(default,), name="cuvee-default-threads")
    try:
        keeper.start()
    except RuntimeError:  # the system starts no more threads
        _set(default)
    else:
        keeper.join()


def _set(number: int) -> None:
    # vLLM's CPU worker replaces `torch.set_num_threads` by a function that does nothing.
    torch._C.set_num_threads(number)
