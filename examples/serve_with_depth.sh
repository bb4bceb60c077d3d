#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serves the reference model by depth: of the tokens of a decode step, shares exit after 6
# and after 9 of the 12 layers. Options of `vllm serve` can follow. Another model takes a
# calibration of its own: examples/applications/utio/utio_calibrate.py --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec .venv/bin/vllm serve examples/reference_model/model --served-model-name reference \
    --enforce-eager --kv-cache-memory-bytes 1073741824 \
    --enable-utio --utio-bucket-cutoffs 6,9 --utio-min-batch-size 1 \
    --utio-calibration examples/demo/calibration.safetensors "$@"
