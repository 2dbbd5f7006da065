"""Griffe extension: render the `Example:` section of a docstring as code, which Griffe does for `Examples:` alone."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class Examples(Extension):
    """Rename the section before its docstring is parsed."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rename the section of one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
