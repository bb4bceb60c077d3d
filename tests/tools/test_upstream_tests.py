# SPDX-License-Identifier: Apache-2.0
"""What a session of upstream's tests says, whoever ended it."""

import pytest

from tools import upstream_tests
from tools.common import HERE

OTHER = "tests/test_other.py"
KERNELS = upstream_tests.INTERPRETED[0]


@pytest.mark.parametrize("file", [KERNELS, OTHER])
@pytest.mark.parametrize(
    ("body", "passes"), [("pass", True), ("assert False", False), ("os.abort()", False)]
)
def test_a_session_that_fails_or_is_killed_fails_both(tmp_path, file, body, passes):
    for name in (KERNELS, OTHER):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        said = body if name == file else "pass"
        path.write_text(f"import os\n\n\ndef test_it():\n    {said}\n")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    code = upstream_tests._run(HERE, tmp_path, [KERNELS, OTHER], [], "")
    assert (code == 0) is passes
