# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM's V2 model runner run without a GPU, through Triton's interpreter.

The CPU build of vLLM switches Triton off unless a Triton backend named `cpu` is
installed. The entry point beside this package names one that compiles nothing:
with `TRITON_INTERPRET=1` every kernel is interpreted and no backend is asked for
anything. Triton finds it in every process whose `PYTHONPATH` has the folder above,
the engine's and the workers' included. It belongs to the tests, not to the product.
"""
