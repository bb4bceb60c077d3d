# SPDX-License-Identifier: Apache-2.0
"""What a new release may change of the locked versions."""

from tools import requirements


def test_what_the_wheel_pins_itself_is_not_kept():
    rows = ["# a comment", "torch==2.13.0", "outlines-core==0.2.10", "numpy==2.3.0"]
    wanted = ["torch==2.14.0+cpu", "outlines_core == 0.2.14", "jinja2"]
    wanted += ["numpy>=2; python_version == '3.11'"]
    assert requirements.kept(rows, wanted) == ["numpy==2.3.0"]
