# SPDX-License-Identifier: Apache-2.0
"""The unpatched release that the fork is compared with."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import runners

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from processes import BUILD, upstream_folder

# As `model_classes` of conftest.py: what vLLM asks a model's class is answered here.
PRELUDE = """
from vllm.model_executor.models import registry
registry._run_in_subprocess = lambda answer: answer()
"""


@pytest.fixture(scope="session")
def upstream() -> Path:
    """A folder with the unpatched release in it."""
    try:
        return upstream_folder()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def run_both(
    program: str, job: dict, runner: str, upstream: Path, folder: Path
) -> tuple[dict, dict]:
    """The answers of the fork and of the release to a job: the fork's in this process,
    the release's in one of its own.

    Args:
        program: reads the job from the file `argv[1]` and writes its answer, with the
            file of its vLLM as `file`, to `argv[2]`.
        upstream: of the fixture.
        folder: an empty one.
    """
    files = [folder / name for name in ("job.json", "fork.json", "upstream.json")]
    source, of_fork, of_upstream = files
    source.write_text(json.dumps(job))
    script = folder / "program.py"
    script.write_text(PRELUDE + program)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), str(source), str(of_fork)])
        runpy.run_path(str(script), run_name="__main__")
    environment = runners.environment(runner, [upstream])
    # Or each would throw out what the other has kept of a model's class.
    environment["VLLM_CACHE_ROOT"] = str(BUILD / "upstream" / "cache")
    command = [sys.executable, str(script), str(source), str(of_upstream)]
    subprocess.run(command, env=environment, check=True)
    fork, release = (json.loads(file.read_text()) for file in (of_fork, of_upstream))
    assert Path(release.pop("file")).is_relative_to(upstream)
    assert not Path(fork.pop("file")).is_relative_to(upstream)
    return fork, release
