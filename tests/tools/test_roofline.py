# SPDX-License-Identifier: Apache-2.0
"""The page on large models is what its script writes, and its formulas hold on a CPU."""

import sys

import pytest

from tools.common import HERE

sys.path.insert(0, str(HERE.root / "benchmarks"))
import roofline  # noqa: E402

README = (HERE.root / "benchmarks" / "README.md").read_text()


def test_the_page_is_what_the_script_writes():
    assert roofline.PAGE.read_text() == roofline.page(), "run benchmarks/roofline.py"


def test_the_formulas_give_what_was_measured():
    checked, _ = roofline.check(README)
    checked += roofline.check_drafting(README)
    assert len(checked) >= 20
    assert [one for one in checked if one.error > roofline.ERROR] == []


def test_the_rates_are_found_again():
    device = roofline.Device("CPU", 40e9, 90e9, 10e9, False)
    rows = [
        {"batch": str(batch), "context": str(context),
         "full depth, ms": 1e3 * roofline.full(roofline.CPU, device, batch, context)}
        for batch, context in ((8, 32), (64, 32), (32, 1024), (128, 32))
    ]  # fmt: skip
    assert roofline.fit(roofline.CPU, rows)[1:4] == pytest.approx(device[1:4], rel=1e-6)


def test_shapes_are_those_of_the_models():
    """Parameters in billions, embeddings counted."""
    for model, billions in zip(roofline.MODELS, (8.0, 70.6, 405.9)):
        total = model.layers * model.layer + 2 * model.head
        assert total / 1e9 == pytest.approx(billions, rel=0.01)


def test_no_draft_that_is_refused_pays():
    device = roofline.gpus("H100", 1)
    assert roofline.drafted(roofline.MODELS[0], device, 1, 2048, 0.0)[0] < 1
