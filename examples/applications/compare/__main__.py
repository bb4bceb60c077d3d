# SPDX-License-Identifier: Apache-2.0
"""Compare quantized models with a reference: `python examples/applications/compare`."""

import sys
from pathlib import Path

if not __package__:  # run as a folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from compare.cli import main

if __name__ == "__main__":
    main()
