"""How many threads torch's operations take, set for the calling thread alone.

`torch.set_num_threads` sets more: threads that start later take over the number that any thread has set last. And
vLLM's CPU worker replaces it by a function that does nothing. OpenMP and MKL keep a number per thread, so they are told
directly.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from cuvee.codec.support.once import Once

_once = Once(logging.getLogger(__name__))


@contextmanager
def computing_alone() -> Iterator[None]:
    """Let torch run the operations of the calling thread in this thread only.

    The last bits of a product may depend on the number of threads, and each thread's first operation on several threads
    starts threads that stay.
    """
    before = torch.get_num_threads()  # or the thread's first operation would take the number from the default
    set_openmp, set_mkl = _setters()
    mkl_before = set_mkl(1)
    set_openmp(1)
    try:
        yield
    finally:
        set_mkl(mkl_before)
        set_openmp(before)


def compute_alone() -> None:
    """Let torch run the operations of the calling thread in this thread only, from now on."""
    torch.get_num_threads()  # as above
    for set_number in _setters():
        set_number(1)


@cache
def _setters() -> tuple[Callable[[int], Any], Callable[[int], Any]]:
    """Return the functions that set the calling thread's number of threads, of OpenMP and of MKL.

    MKL's returns the number before. A torch without MKL needs none.
    """
    set_openmp, set_mkl = _loaded("omp_set_num_threads"), _loaded("MKL_Set_Num_Threads_Local")
    before = torch.get_num_threads()
    if set_openmp is not None:
        set_openmp(before + 1)
        obeyed = torch.get_num_threads() == before + 1
        set_openmp(before)
        if obeyed:
            return set_openmp, set_mkl or _ignore
    _once(
        "openmp",
        "cuvee: torch's OpenMP library was not found, so torch's operations share out the work of each of the codec's "
        "threads: coding may be slower, and last bits of values depend on torch.get_num_threads(); "
        "OMP_NUM_THREADS=1 ends both",
    )
    return _ignore, _ignore


def _loaded(name: str) -> Any:
    """Return a function of the libraries that torch has loaded, the one that torch calls; None if there is none."""
    for library in (None, torch._C.__file__):  # what is loaded for all comes first, such as a preloaded OpenMP
        function = getattr(ctypes.CDLL(library), name, None)
        if function is not None:
            return function
    return None


def _ignore(_: int) -> int:
    return 0
