# SPDX-License-Identifier: Apache-2.0
"""Processes that tests start spend less of their time on importing vLLM.

That makes a million objects, and to look for garbage among them takes a fifth of the
import, and as much again when Python ends: what is frozen is left out. More than a tenth
is scikit-learn and SciPy's signals, which Transformers and vLLM import where they are
installed, as lm-eval has them, for a way of generating that is not vLLM's and for audio.
Python runs a module of this name at start.

And on a CPU vLLM has each engine of a server, and each of several workers, import all of
it once more: here they are forks of the server, as on GPUs by default, unless
`SPAWN_ENGINES` is set. Workers are not where OpenMP binds them, which it does as it is
loaded. Nor is what the tests' own process starts, which would have the engines and the
threads that are there.
"""

import atexit
import gc
import multiprocessing
import os
import sys


class FreezeBeforeEngines:
    """Freezes what is imported before the first engine can be made, and finds nothing.

    Each start of an engine asks for several collections.
    """

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> None:
        if name == "vllm.v1.engine.core":
            gc.freeze()
            gc.freeze = gc.unfreeze = lambda: None  # as an engine ends it would thaw all
            gc.set_threshold(50_000, 20, 20)


def get_context(method: str | None = None):
    """A fork where vLLM asks for a way to start engines or workers."""
    asks = sys._getframe(1)
    if asks.f_globals.get("__name__") == "vllm.utils.system_utils":
        starts_workers = ".executor." in asks.f_back.f_globals["__name__"]
        if not starts_workers or os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
            method = "fork"
    return _get_context(method)


gc.set_threshold(1_000_000, 20, 20)
sys.meta_path.insert(0, FreezeBeforeEngines)
atexit.register(gc.freeze)
for module in ("sklearn", "scipy.signal"):
    sys.modules.setdefault(module, None)  # as if they were not installed
if __name__ == "sitecustomize" and "SPAWN_ENGINES" not in os.environ:
    _get_context = multiprocessing.get_context
    multiprocessing.get_context = get_context
