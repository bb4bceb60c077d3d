# SPDX-License-Identifier: Apache-2.0
"""Checks that a server has what icm.py needs, and says what to do where it has not.

    .venv/bin/python examples/applications/icm/verify_server.py --base-url http://localhost:8000
"""

import argparse
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
from common import ClientError
from common.program import any_terminal
from scorer import TOP_LOGPROBS, Scorer

TOLERANCE = 1e-3
"""Nats by which a named score may differ from the same token's sampling log-prob: the
two are computed in different batches, with 16-bit weights in the worst case."""
SIXTEEN_BIT_TOLERANCE = 0.1
REPEATED = 40
"""Lines of text in the prompt of the cache check: many blocks of any size."""


class Failure(Exception):
    """A check that failed, and what to do."""


def completion(client: Scorer) -> str:
    ((text,),) = client.sample(["import numpy as"], max_tokens=8, temperature=0)
    if not text:
        raise Failure("it generated nothing; is the model a generative one?")
    return repr(text)


def logprobs(client: Scorer) -> dict[str, float]:
    try:
        return client.top_logprobs("import numpy as")
    except ClientError as error:
        raise Failure(
            f"none ({error}); vLLM: --max-logprobs must be {client.top} or more"
        ) from error


def named_scores(client: Scorer) -> str:
    if not client.scores_by_name:
        raise Failure(
            "the server does not know target_token_ids. icm.py works with the top "
            "log-probabilities, less exactly and without a common call; serve the "
            "model with this fork: .venv/bin/vllm serve --config "
            "examples/applications/icm/configs/..."
        )
    (prompt,) = client.encode(["import numpy as"], begin=True)
    top = client.top_ids(prompt)
    (scores,) = client.score([prompt], [[token] for token in top]).logprobs
    worst = max(abs(score - top[token]) for token, score in zip(top, scores))
    if worst > SIXTEEN_BIT_TOLERANCE:
        raise Failure(
            f"named scores are {worst:.2g} nats off the log-probabilities of sampling. "
            "Is --logprobs-mode the default, raw_logprobs?"
        )
    note = "" if worst <= TOLERANCE else ", as 16-bit weights can"
    return f"{len(top)} tokens, at most {worst:.1e} nats off those of sampling{note}"


def one_call(client: Scorer) -> str:
    prompts = client.encode([f"x = {n}" for n in range(64)], begin=True)
    begin = time.perf_counter()
    client.score(prompts, [prompts[0][-1:]])
    seconds = time.perf_counter() - begin
    return f"64 prompts in {seconds:.2f} s"


def prefix_cache(client: Scorer) -> str:
    text = f"# {uuid.uuid4()}\n" + "import numpy as np\n" * REPEATED
    (prompt,) = client.encode([text], begin=True)
    if client.max_model_len:
        prompt = prompt[: client.max_model_len - 16]
    for _ in range(2):
        cached = client.score([prompt], [prompt[-1:]]).cached_tokens
    if cached is None:
        raise Failure(
            "usage has no prompt_tokens_details, so nobody knows: start vLLM without "
            "--no-enable-prompt-tokens-details"
        )
    block = client.block_size()
    expected = max(1, (len(prompt) - 1) // block * block)
    if cached < expected:
        raise Failure(
            f"the second time, {cached} of {len(prompt)} tokens came from the cache, "
            f"and {expected} should have; start vLLM with --enable-prefix-caching"
        )
    return f"{cached} of {len(prompt)} tokens the second time"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base-url", default="http://localhost:8000")
    parser.add_argument("--model", help="served name; default: the only one")
    parser.add_argument("--api-key", default="EMPTY")
    parser.add_argument("--patience", type=float, default=10,
                        help="seconds to wait for the server")  # fmt: skip
    parser.add_argument("--top-logprobs", type=int, default=TOP_LOGPROBS,
                        help="to ask for")  # fmt: skip
    args = parser.parse_args()
    any_terminal()
    try:
        client = Scorer(
            args.base_url,
            args.model,
            api_key=args.api_key,
            patience=args.patience,
            top_logprobs=args.top_logprobs,
        )
    except ClientError as error:
        sys.exit(
            f"✗ server: {error}\n"
            "  Start one: .venv/bin/vllm serve --config "
            "examples/applications/icm/configs/reference.yaml"
        )
    print(f"✓ server: {client.url} serves {client.model}")
    if client.max_model_len:
        print(f"✓ context: {client.max_model_len} tokens")
    failed = 0

    def check(name: str, find: Callable[[], str]) -> None:
        nonlocal failed
        try:
            print(f"✓ {name}: {find()}")
        except (Failure, ClientError) as problem:
            failed += 1
            print(f"✗ {name}: {problem}")

    def first_logprob() -> str:
        top = logprobs(client)
        best = max(top, key=top.__getitem__)
        return f"the top {len(top)} tokens, first {best!r} with {top[best]:.2f}"

    with client:
        check("completion", lambda: completion(client))
        check("log-probabilities", first_logprob)
        check("named-token scores", lambda: named_scores(client))
        if client.scores_by_name:
            check("one call", lambda: one_call(client))
            check("prefix cache", lambda: prefix_cache(client))
    if failed:
        sys.exit(f"{failed} check(s) failed.")
    print("All that icm.py needs is there.")


if __name__ == "__main__":
    main()
