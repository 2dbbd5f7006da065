"""Compile functions that only compiled loops call: they are linked into the loops, and get no machine code.

Numba translates each function that it compiles to machine code, and also links it into its callers. Of a function that
Python does not call, the machine code is of no use, and takes a seventh of all compilation. It is optimized by
itself all the same, as Numba does it, so that its callers get the same code.
"""

from __future__ import annotations

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class _LinkedCode(JITCodeLibrary):  # type: ignore[misc, unused-ignore]
    """The optimized code of one function."""

    @property
    def codegen(self) -> _LinkedCode:
        """What Numba tells the environment of the function, see `set_env`."""
        return self

    def set_env(self, name: str, environment: object) -> None:
        """Ignore the environment: it is written to the machine code, and holds the objects that Python code needs."""

    def get_pointer_to_function(self, name: str) -> int:
        """Return the null pointer: no function has an address."""
        self._ensure_finalized()
        return 0

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class LinkedCompiler(Compiler):  # type: ignore[misc, unused-ignore]
    """Numba's compiler, for functions that are linked into others. They must not need Python objects.

    Such are the arguments of an error, unless they are constants.
    """

    def define_pipelines(self) -> Any:
        """Return Numba's passes, which are to put the code where no machine code is made of it."""
        state = self.state
        state.library = _LinkedCode(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return super().define_pipelines()
