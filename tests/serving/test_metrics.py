# SPDX-License-Identifier: Apache-2.0
"""Metrics of scoring, and the dashboard that shows them beside those of depth routing."""

import json
import re
import time
from collections import defaultdict
from pathlib import Path

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families
from scoring import random_ids
from scoring_server import REQUEST_SECONDS, Server
from tiny_models import CONFIGS

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "scoring_and_depth.json"
DEEP_VOCABULARY = CONFIGS["deep_llama"].vocab_size
LONG = random_ids(1, DEEP_VOCABULARY, 150)
SHORT = random_ids(2, DEEP_VOCABULARY, 12)


@pytest.fixture
def server(routing_server):
    return routing_server


def samples(server: Server) -> dict[str, list]:
    """The samples of each of vLLM's metrics, by the metric's name in queries."""
    text = requests.get(server.url + "/metrics", timeout=REQUEST_SECONDS).text
    found = defaultdict(list)
    for family in text_string_to_metric_families(text):
        name = family.name + "_total" * (family.type == "counter")
        found[name] += family.samples
    return {name: found[name] for name in found if name.startswith("vllm:")}


def scoring(server: Server) -> dict[str, float]:
    prefix = "vllm:scoring_"
    return {
        name.removeprefix(prefix).removesuffix("_total"): next(
            sample.value for sample in values if sample.name == name
        )
        for name, values in samples(server).items()
        if name.startswith(prefix) and name.endswith("_total")
    }


def test_scoring_is_counted(server):
    before = scoring(server)
    began = time.perf_counter()
    # Rows, candidates and prompt tokens that are needed: with nothing to generate, the
    # last token is not.
    jobs = [
        (dict(prompt=LONG, target_token_ids=[[5, 6], [-1, 7], []]), 2, 3, 149),
        (dict(prompt=LONG, target_token_ids=[8]), 1, 1, 149),
        (dict(prompt=SHORT, target_top_k=3), 11, 0, 11),
        (dict(prompt=SHORT, prompt_logprobs=2, max_tokens=1), 11, 11, 12),
        (dict(prompt=SHORT, echo=True, logprobs=1, max_tokens=1), 11, 11, 12),
        (dict(prompt=[SHORT, LONG], target_token_ids=[[5], [6]]), 2, 2, 11 + 149),
    ]
    cached = 0
    for fields, *_ in jobs:
        usage = server.ask(**({"max_tokens": 0} | fields))["usage"]
        cached += (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    server.ask(prompt=LONG, max_tokens=2)  # scores nothing
    elapsed = time.perf_counter() - began
    found = {name: value - before[name] for name, value in scoring(server).items()}
    seconds = found.pop("head_seconds")
    assert 0 < seconds < elapsed
    rows, candidates, needed = (sum(job[i] for job in jobs) for i in (1, 2, 3))
    assert cached > 0
    assert found == {
        "requests": 7,
        "rows": rows,
        "candidates": candidates,
        "prompt_tokens": needed,
        "cached_prompt_tokens": cached,
    }


def test_the_dashboard_names_what_is_there(server):
    server.ask(prompt=[SHORT] * 4, max_tokens=6, temperature=0, ignore_eos=True)
    server.ask(prompt=SHORT, target_token_ids=[5], max_tokens=0)
    found = samples(server)
    panels = json.loads(DASHBOARD.read_text())["panels"]
    targets = [target for panel in panels for target in panel.get("targets", ())]
    assert len(targets) > 10
    for target in targets:
        query, legend = target["expr"], target["legendFormat"]
        names = re.findall(r"vllm:\w+", query)
        assert names
        labels = set(re.findall(r"(\w+)=~", query))
        for group in re.findall(r"by \(([^)]*)\)", query):
            labels |= set(group.split(", "))
        assert set(re.findall(r"{{(\w+)}}", legend)) <= labels, legend
        for name in names:
            assert name in found, name
            # Those come with measurements of routed steps.
            measured = name.startswith(("vllm:utio_speedup", "vllm:utio_audit"))
            assert found[name] or measured, name
            for sample in found[name]:
                if sample.name == name:
                    assert labels <= sample.labels.keys(), (name, sample.labels)
