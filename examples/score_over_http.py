# SPDX-License-Identifier: Apache-2.0
"""Scores answers to a question, over HTTP.

    .venv/bin/vllm serve examples/reference_model/model --served-model-name reference \\
        --enforce-eager --kv-cache-memory-bytes 1073741824  # one terminal
    .venv/bin/python examples/score_over_http.py
"""

import argparse
import json
import math
import sys
import urllib.error
import urllib.request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", default="reference")
    parser.add_argument("--api-key", help="of a server that wants one")
    parser.add_argument("--prompt", default="import numpy as")
    parser.add_argument("--answers", nargs="+", default=[" np", " numpy", " num"])
    args = parser.parse_args()
    body = {
        "model": args.model,
        "prompt": args.prompt,
        "continuations": args.answers,
        "max_tokens": 0,  # scores, and generates nothing
    }
    headers = {"Content-Type": "application/json"}
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{args.url}/v1/completions", data, headers)
    try:
        with urllib.request.urlopen(request) as response:
            choices = json.load(response)["choices"]
    except urllib.error.HTTPError as error:
        sys.exit(f"{error}: {error.read().decode()}")
    except urllib.error.URLError as error:
        sys.exit(f"{args.url}: {error.reason}")
    for answer, choice in zip(args.answers, choices):
        total = choice["target_logprobs"]["logprob_sum"]  # None: of an impossible token
        print(f"{answer!r}: {-math.inf if total is None else total:.2f} nats")


if __name__ == "__main__":
    main()
