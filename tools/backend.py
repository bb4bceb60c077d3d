# SPDX-License-Identifier: Apache-2.0
"""Build a wheel of the tree in the current folder, in this very process.

Run by ``tools.wheel`` as a script, with an environment made for it. It calls the
standard build back end directly (PEP 517), since two values have to be set between
the import of torch and upstream's setup.py, which have no bearing on binaries compiled
elsewhere: setup.py takes a build for CUDA to be one only if torch itself is, and asks
what machine this is for the names of the libraries to expect.
"""

import argparse
import os
import platform

import torch
from setuptools import build_meta


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("machine", help="that the binaries are for")
    parser.add_argument("--cuda", default="", help="CUDA version of the binaries")
    arguments = parser.parse_args()
    if arguments.cuda and torch.version.cuda is None:
        torch.version.cuda = arguments.cuda
    platform.machine = lambda: arguments.machine
    os.umask(0o022)
    # The tag of upstream's own wheels; the libraries use the stable ABI.
    options = ["--py-limited-api=cp38", f"--plat-name=linux_{arguments.machine}"]
    config = {"--build-option": options}
    print("built", build_meta.build_wheel(arguments.output, config))


if __name__ == "__main__":
    main()
