"""Python runs this first in every process with an engine (`engines.environment`).

To import vLLM makes a million objects, none of them garbage; to search them again and again takes a fifth of the time.
"""

import gc

gc.set_threshold(200_000, 20, 100)
