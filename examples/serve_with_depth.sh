#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serves the reference model by depth: of two tokens in a decode step, as of a request with
# "n": 2, one exits after 6 of the 12 layers; of more tokens, half do. An answer's
# `usage.mean_decode_depth` says how many layers its tokens ran. Without --no-utio-gate it
# would route only where that is measured to be faster; for a few requests it is not.
# Options of `vllm serve` can follow. Another model takes a calibration of its own:
# examples/applications/utio/utio_calibrate.py --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec .venv/bin/vllm serve examples/reference_model/model --served-model-name reference \
    --enforce-eager --kv-cache-memory-bytes 1073741824 \
    --enable-utio --utio-bucket-cutoffs 6 --utio-min-batch-size 1 --no-utio-gate \
    --utio-calibration examples/demo/calibration.safetensors "$@"
