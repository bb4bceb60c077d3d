# SPDX-License-Identifier: Apache-2.0
"""Compare quantized models with a reference, by exact scores of named tokens."""
