# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: upstream's tests tear nothing down after each of them.

Upstream's `conftest.py` looks for garbage among all objects after each test that is not
marked so, half a second a time. It is for tests that start engines in their process, and
those are not run here.
"""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker("skip_global_cleanup")
