# SPDX-License-Identifier: Apache-2.0
"""Processes that tests start spend less of their time on importing vLLM.

That makes a million objects. To look for garbage among them each time takes a fifth of
the import, and to do so when Python ends as much again: what is frozen is left out. More
than a tenth is scikit-learn and SciPy's signals, which Transformers and vLLM import where
they are installed, as lm-eval has them, for a way of generating that is not vLLM's and
for audio. Python runs a module of this name at start.
"""

import atexit
import gc
import sys


class FreezeBeforeEngines:
    """Freezes what is imported before the first engine can be made, and finds nothing.

    Each start of an engine asks for several collections.
    """

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> None:
        if name == "vllm.v1.engine.core":
            gc.freeze()


gc.set_threshold(50_000, 20, 20)
sys.meta_path.insert(0, FreezeBeforeEngines)
atexit.register(gc.freeze)
for module in ("sklearn", "scipy.signal"):
    sys.modules.setdefault(module, None)  # as if they were not installed
