# SPDX-License-Identifier: Apache-2.0
"""What the process that the parts are forked from imports, once for all of them."""

import gc
import signal

from common import quiet

signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends without a traceback
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked by who starts it
quiet.hush(in_process=True)  # of this process too
# Two fifths of the import would be looking for garbage, of which there is none.
gc.disable()

import lm_eval.models.vllm_causallms  # noqa: F401
import vllm.model_executor.models.llama  # noqa: F401
import vllm.v1.engine.core  # noqa: F401
import vllm.v1.engine.llm_engine  # noqa: F401
import vllm.v1.worker.cpu_worker  # noqa: F401

gc.freeze()
gc.enable()
