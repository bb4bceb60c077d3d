# SPDX-License-Identifier: Apache-2.0
"""Build a wheel of the tree in the current folder, in this very process.

Run by ``tools.wheel`` as a script, with an environment made for it. It calls the
standard build back end directly (PEP 517), since one value has to be set between
the import of torch and upstream's setup.py: setup.py takes a build for CUDA to be
one only if torch itself is, which has no bearing on binaries compiled elsewhere.
"""

import argparse
import os

import torch
from setuptools import build_meta


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("--cuda", default="", help="CUDA version of the binaries")
    arguments = parser.parse_args()
    if arguments.cuda and torch.version.cuda is None:
        torch.version.cuda = arguments.cuda
    os.umask(0o022)
    # The tag of upstream's own wheels; the libraries use the stable ABI.
    options = {"--build-option": ["--py-limited-api=cp38"]}
    print("built", build_meta.build_wheel(arguments.output, options))


if __name__ == "__main__":
    main()
