# SPDX-License-Identifier: Apache-2.0
"""Scores answers to a question, over HTTP.

    .venv/bin/vllm serve examples/reference_model/model --served-model-name reference \\
        --enforce-eager --kv-cache-memory-bytes 1073741824  # one terminal
    .venv/bin/python examples/score_over_http.py
"""

import argparse
import json
import urllib.request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", default="reference")
    parser.add_argument("--prompt", default="import numpy as")
    parser.add_argument("--answers", nargs="+", default=[" np", " numpy", " num"])
    args = parser.parse_args()
    body = {
        "model": args.model,
        "prompt": args.prompt,
        "continuations": args.answers,
        "max_tokens": 0,  # scores, and generates nothing
    }
    request = urllib.request.Request(
        f"{args.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        choices = json.load(response)["choices"]
    for answer, choice in zip(args.answers, choices):
        rows = choice["target_logprobs"]["logprobs"]
        print(f"{answer!r}: {sum(row[0] for row in rows):.2f} nats")


if __name__ == "__main__":
    main()
