"""Numba's compiler, with a cache on disk where possible.

Compiling all loops takes some twenty seconds. A cache beside the sources, or in the user's cache folder, saves later
processes that time. If both are read-only, as in a container or a service without a home, Numba refuses to define the
function. In that case it is compiled anew in each process, and one log message names the remedy: `NUMBA_CACHE_DIR`. The
cache is pickled, so only this user may be able to write to it. A folder of that name that nobody can write is read: an
image holds what `cuvee warmup` compiled when it was built.

Numba keeps a compiled function until the file of the function changes. But functions of other files are compiled into
it, and constants of any module that they import, so here it is kept until any Python file of the codec changes.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numba as nb
from numba.core import caching
from numba.core.compiler_lock import global_compiler_lock

from cuvee.codec.stages.compiled.linking import LinkedCompiler
from cuvee.codec.support.once import Once

_log = logging.getLogger(__name__)

_once = Once(_log)

# A fork waits for the compiler. A child forked while another thread compiles would inherit a lock that no thread of the
# child releases, and an LLVM in an unfinished state.
os.register_at_fork(
    before=global_compiler_lock.acquire,
    after_in_parent=global_compiler_lock.release,
    after_in_child=global_compiler_lock.release,
)


def source_stamp(folder: Path) -> str:
    """Return a digest of the names and contents of all Python files in a folder and below."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder)} {len(content)} ".encode() + content)
    return digest.hexdigest()


_STAMP = source_stamp(Path(__file__).parents[2])
# Numba's stubs do not list these options. C calls none of our loops, and of `inner` ones neither does Python.
_NOT_FROM_C: dict[str, Any] = {"no_cfunc_wrapper": True}
_INNER: dict[str, Any] = _NOT_FROM_C | {"no_cpython_wrapper": True, "pipeline_class": LinkedCompiler}


def compiled(function: Callable[..., Any]) -> Any:
    """Return the function, to be compiled at its first call. It releases the GIL.

    Without a usable cache, each process compiles it, and two things make that longer. Numba specializes on literals, in
    calls and before loops: use `np.int64(0)`. Assigning an array to a slice also compiles the error message for other
    shapes, which takes seconds: loops copy entry by entry.
    """
    return _cached(nb.njit(nogil=True, **_NOT_FROM_C)(function))


def compiled_briefly(function: Callable[..., Any]) -> Any:
    """Compile work of microseconds. It keeps the GIL: to get it back from another thread takes longer."""
    return _cached(nb.njit(nogil=False, **_NOT_FROM_C)(function))


def inner(function: Callable[..., Any]) -> Any:
    """Return a function that only compiled loops call: it becomes a part of them, and Python has no way to call it.

    Without a wrapper for Python, a cache file and machine code of its own it compiles faster.
    """
    return nb.njit(nogil=True, **_INNER)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Make a function part of each loop that calls it.

    LLVM leaves longer functions as they are, and a call passes seven words for each array: more than it takes to place
    a head.
    """
    return nb.njit(nogil=True, inline="always")(function)


class _ReadOnly(caching.UserProvidedCacheLocator):  # type: ignore[misc, unused-ignore]
    """The folder that the user names, where it can be read but not written."""

    def ensure_cache_path(self) -> None:
        """Raise OSError if there is no compiled code."""
        if not any(Path(self.get_cache_path()).glob("*.nbi")):
            raise FileNotFoundError(self.get_cache_path())


class _CompileCache(caching.CompileResultCacheImpl):  # type: ignore[misc, unused-ignore]
    _locator_classes: ClassVar[list[Any]] = [  # type: ignore[misc, unused-ignore]
        each
        for locator in caching.CompileResultCacheImpl._locator_classes
        for each in ((locator, _ReadOnly) if locator is caching.UserProvidedCacheLocator else (locator,))
    ]


class _FunctionCache(caching.FunctionCache):  # type: ignore[misc, unused-ignore]
    _impl_class = _CompileCache


def cache_folder(function: Any) -> Path:
    """Return the folder where a compiled function is kept for later processes.

    Raises:
        OSError: there is none that this process can write.
    """
    cache = function._cache
    try:
        if isinstance(cache, caching.NullCache) or isinstance(cache._impl.locator, _ReadOnly):
            raise PermissionError("no folder is writable")
        cache._impl.locator.ensure_cache_path()
    except OSError as error:
        raise OSError(
            f"no place for compiled code: set NUMBA_CACHE_DIR to a folder that this user alone can write: {error}"
        ) from error
    return Path(cache.cache_path)


def _cached(made: Any) -> Any:
    """Let a compiled function use the cache on disk."""
    try:
        made._cache = _FunctionCache(made.py_func)
    except (RuntimeError, OSError) as error:
        # Numba has no error class for "no locator available". Any other problem appears when it compiles.
        _tell("there is no writable folder for compiled code", error)
        return made
    # A disk that is full or read-only by then fails at the call that compiles.
    cache = made._cache
    cache._cache_file._source_stamp = (cache._cache_file._source_stamp, _STAMP)
    cache.load_overload = _forgiving(cache.load_overload, "compiled code cannot be read from its cache")
    cache.save_overload = _forgiving(cache.save_overload, "compiled code cannot be written to its cache")
    return made


def _forgiving(work: Callable[..., Any], what: str) -> Callable[..., Any]:
    def tried(*arguments: Any) -> Any:
        try:
            return work(*arguments)
        except Exception as error:  # from the file system, or from pickle if the file is damaged
            _tell(what, error)
            return None

    return tried


def _tell(what: str, error: Exception) -> None:
    """Log the first occurrence of a problem."""
    _once(
        what,
        "cuvee: %s; it is compiled anew in every process, which takes some seconds. Set NUMBA_CACHE_DIR to "
        "a folder that this user alone can write: %s",
        what,
        error,
    )
