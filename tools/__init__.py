# SPDX-License-Identifier: Apache-2.0
"""The fork's own tools: fetch the pin, keep the patch series, build the wheel.

Each module is a command: ``python -m tools.series --help`` and so on, from the
root of the checkout. ``build.sh`` runs them in order.
"""
