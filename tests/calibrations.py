# SPDX-License-Identifier: Apache-2.0
"""A tiny model's folder and the options of `examples/applications/utio/utio_calibrate.py`."""

import sys
from pathlib import Path

import pytest
from tiny_models import CONFIGS, SHORT_TEXTS, save_model

ROOT = Path(__file__).parents[1]
APPLICATIONS = ROOT / "examples" / "applications"
sys.path[:0] = [str(APPLICATIONS / "utio"), str(APPLICATIONS)]

FAMILIES = [family for family in CONFIGS if family.startswith("deep_")]
LAYERS, HIDDEN = 6, 128
CUTOFFS = [2, 5]
CONTEXT = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a tiny model, made when first asked for."""
    made = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = save_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


def arguments(model: Path, output: Path, *more: str) -> list[str]:
    return [
        *("--model", str(model), "--output", str(output), "--device", "cpu"),
        *("--cutoffs", *map(str, CUTOFFS), "--context-length", str(CONTEXT)),
        *("--text", *map(str, SHORT_TEXTS), *more),
    ]
