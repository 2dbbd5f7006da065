"""Python runs this first in every process with an engine (`engines.environment`).

To import vLLM makes a million objects, none of them garbage; to search them again and again takes a fifth of the time.
transformers imports scikit-learn where it is installed, for a way of generating that no engine has: a tenth more.
"""

import gc
import sys
from typing import Any

gc.set_threshold(200_000, 20, 100)
modules: dict[str, Any] = sys.modules
modules["sklearn"] = None  # as if it were not installed
