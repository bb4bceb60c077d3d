# SPDX-License-Identifier: Apache-2.0
"""Install the wheel of ``dist/`` into ``.venv``, without dependencies.

Its metadata asks for packages that the lock leaves out on purpose.
"""

import argparse
import subprocess

from tools import lock as locks
from tools.common import HERE, Checkout, ToolError, clean_environment, run_main


def install(checkout: Checkout, device: str) -> None:
    """Put the wheel in place of whatever ``vllm`` is installed.

    Raises:
        ToolError: there is not exactly one wheel of the locked version, or pip fails.
    """
    version = locks.read(checkout).version(device)
    wheels = sorted(checkout.dist.glob(f"vllm-{version}-*.whl"))
    if len(wheels) != 1:
        raise ToolError(f"{len(wheels)} wheels of {version} in dist/, wanted one")
    command = [str(checkout.venv / "bin" / "python"), "-m", "pip", "install"]
    command += ["--no-deps", "--no-index", "--force-reinstall", str(wheels[0])]
    environment = clean_environment(checkout)
    if subprocess.run(command, env=environment).returncode:
        raise ToolError(f"pip could not install {wheels[0].name}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.install", description=__doc__
    )
    parser.add_argument("device", choices=["cpu"])
    install(HERE, parser.parse_args().device)


if __name__ == "__main__":
    run_main(main)
