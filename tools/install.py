# SPDX-License-Identifier: Apache-2.0
"""Install the wheel of ``dist/`` into ``.venv``, without dependencies.

Its metadata asks for packages that the lock leaves out on purpose.
"""

import argparse
import subprocess

from tools import lock as locks
from tools.common import HERE, Checkout, ToolError, run_main
from tools.index import pip_environment
from tools.lock import Target


def install(checkout: Checkout) -> None:
    """Put the CPU's wheel in place of whatever ``vllm`` is installed.

    Raises:
        ToolError: there is not exactly one wheel of the locked version, or pip fails.
    """
    wheels = locks.read(checkout).built(checkout, Target("cpu"))
    if len(wheels) != 1:
        raise ToolError(f"{len(wheels)} wheels for the CPU in dist/, wanted one")
    command = [str(checkout.venv / "bin" / "python"), "-m", "pip", "install"]
    command += ["--no-deps", "--no-index", "--force-reinstall", str(wheels[0])]
    if subprocess.run(command, env=pip_environment(checkout)).returncode:
        raise ToolError(f"pip could not install {wheels[0].name}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.install", description=__doc__
    )
    parser.parse_args()
    install(HERE)


if __name__ == "__main__":
    run_main(main)
