# SPDX-License-Identifier: Apache-2.0
"""Processes that tests start look for garbage less often.

Importing vLLM makes a million objects; to look for garbage among them each time takes a
fifth of the import. Python runs a module of this name at start.
"""

import gc

gc.set_threshold(50_000, 20, 20)
