# SPDX-License-Identifier: Apache-2.0
"""`examples/applications/icm`: its options, the testbeds, the configurations."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from icm_runs import testbed  # noqa: F401

FOLDER = Path(__file__).parents[2] / "examples" / "applications" / "icm"
sys.path.insert(0, str(FOLDER))

import testbeds
from search import Consistency, Example, agreement


def test_agreement_counts_what_is_labelled_and_known():
    examples = [Example("", 1), Example("", 0), Example(""), Example("", 1)]
    assert agreement({0: 1, 1: 1, 2: 0}, examples) == 0.5
    assert agreement({2: 0}, examples) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pool-size", "one"], "--pool-size"),
        (["--alpha=-1"], "--alpha"),
        (["--no-such-option", "1"], "--no-such-option"),
    ],
)
def test_bad_options(arguments, message):
    done = subprocess.run(
        [sys.executable, FOLDER / "icm.py", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


# The testbeds


def no_sampling(*_, **__):
    raise AssertionError


def test_the_shipped_testbed():
    testbed = testbeds.load("vllm-types", None, 60, 0, no_sampling)
    pool = testbed.pool(60, 0)
    assert len(pool) == 60 == len(set(pool))
    assert Counter(Counter(e.group for e in pool).values()) == {3: 20}
    consistency = Consistency(pool, testbed.rule)
    assert not consistency.pairs({i: e.truth for i, e in enumerate(pool)})
    assert testbed.pool(60, 0) == pool != testbed.pool(60, 1)


@pytest.mark.parametrize("name", ["vllm-types", "truthfulQA"])
def test_a_pool_smaller_than_a_group(name, tmp_path):
    row = {
        "question": "Is the sky green?",
        "mc1_targets": {"choices": ["No", "Yes", "Often"], "labels": [1, 0, 0]},
    }
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([row, row | {"question": "Is it blue?"}]))
    source = str(file) if name == "truthfulQA" else None
    testbed = testbeds.load(name, source, 2, 0, no_sampling)
    with pytest.raises(testbeds.TestbedError, match="--pool-size 2 .* 3 or more"):
        testbed.pool(2, 0)


@pytest.mark.parametrize("name", ["truthfulQA", "gsm8k", "alpaca"])
@pytest.mark.parametrize("row", [{"text": "hello"}, {"question": "1 + 1?"}])
def test_a_data_set_with_other_columns(name, row, tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([row] * 8))
    with pytest.raises(testbeds.TestbedError, match="--dataset.*columns: .'[tq]") as e:
        testbeds.load(name, str(file), 8, 0, no_sampling)
    assert f"--testbed {name}" in str(e.value)


def test_truthful_qa(tmp_path):
    row = {
        "question": "Is the sky green?",
        "mc1_targets": {"choices": ["No", "Yes", "Often"], "labels": [1, 0, 0]},
    }
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([row]))
    testbed = testbeds.load("truthfulQA", str(file), 10, 0, no_sampling)
    assert [e.truth for e in testbed.examples] == [1, 0, 0]
    assert testbed.examples[1].text == (
        "Question: Is the sky green?\nClaim: Yes\nI think this claim is"
    )
    pool = testbed.pool(None, 0)
    consistency = Consistency(pool, testbed.rule)
    assert not consistency.pairs({i: e.truth for i, e in enumerate(pool)})
    assert len(consistency.pairs(dict.fromkeys(range(3), 1))) == 3


@pytest.mark.parametrize("kind", ["parquet", "folder", "configurations", "saved"])
def test_data_sets_in_other_places(tmp_path, kind):
    """Of one of several configurations and of a split, if there are such."""
    from datasets import Dataset

    row = {
        "question": "Is the sky green?",
        "mc1_targets": {"choices": ["No", "Yes"], "labels": [1, 0]},
    }
    rows, place = Dataset.from_list([row]), tmp_path / "rows"
    if kind == "saved":
        rows.save_to_disk(str(place))
    elif kind == "parquet":
        place = tmp_path / "rows.parquet"
        rows.to_parquet(str(place))
    elif kind == "folder":
        place.mkdir()
        rows.to_parquet(str(place / "validation-00000-of-00001.parquet"))
    else:
        configurations = ""
        for name in ("generation", "multiple_choice"):
            (place / name).mkdir(parents=True)
            other = Dataset.from_list([{"question": "?"}])
            these = rows if name == "multiple_choice" else other
            these.to_parquet(str(place / name / "validation.parquet"))
            configurations += (
                f"- config_name: {name}\n  data_files:\n  - split: validation\n"
                f"    path: {name}/validation.parquet\n"
            )
        (place / "README.md").write_text(f"---\nconfigs:\n{configurations}---\n")
    testbed = testbeds.load("truthfulQA", str(place), 10, 0, no_sampling)
    assert [e.truth for e in testbed.examples] == [1, 0]


def test_gsm8k_solutions_are_sampled(tmp_path):
    rows = [
        {
            "question": f"{n} + {n}?",
            "answer": f"<<{n}+{n}>>It is {2 * n}.\n#### {2 * n}",
        }
        for n in range(8)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    asked = []

    def sample(prompts, n, **_):
        asked.extend(prompts)
        return [["The answer is 1,004", "It is 4.", "hm", "So 4"][:n] for _ in prompts]

    testbed = testbeds.load("gsm8k", str(file), 32, 0, sample)
    assert len(asked) == 4 and "<<" not in asked[0]
    for example in testbed.examples:
        number = int(example.group.split()[0]) * 2
        assert example.truth == (number == int(example.key))
        assert example.key in ("1004", "4")
    assert len(testbed.examples) == 12  # one in four has no number


def test_alpaca(tmp_path):
    row = {
        "instruction": "Say hello",
        "input": "",
        "output_1": "hello",
        "output_2": "go\naway",
        "preference": 1,
    }
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([row]))
    testbed = testbeds.load("alpaca", str(file), 10, 0, no_sampling)
    first, second = testbed.examples
    assert (first.truth, second.truth) == (1, 0)
    assert "Response 1: go away\nResponse 2: hello\n" in second.text
    pool = testbed.pool(None, 0)
    assert not Consistency(pool, testbed.rule).pairs(
        {i: e.truth for i, e in enumerate(pool)}
    )


@pytest.mark.parametrize("name", ["truthfulQA", "gsm8k", "alpaca"])
def test_no_hub(name):
    """Says what cannot be had and what to do. The test bed is offline (runners.py)."""
    with pytest.raises(testbeds.TestbedError) as error:
        testbeds.load(name, None, 8, 0, no_sampling)
    for part in (f"--testbed {name}", "--dataset", "vllm-types"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"labels": ["a"], "examples": []}', "labels"),
        ('{"labels": ["a", "b"], "examples": [{"text": "x", "truth": 2},'
         ' {"text": "y"}]}', r"examples\[0\].truth"),
        ("nonsense", "JSON"),
    ],
)  # fmt: skip
def test_a_bad_file(tmp_path, content, message):
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(testbeds.TestbedError, match=message):
        testbeds.load(str(file), None, 8, 0, no_sampling)


@pytest.mark.parametrize("name", ["nothing", ".", ""])
def test_no_such_testbed(name):
    with pytest.raises(testbeds.TestbedError, match="alpaca.*vllm-types"):
        testbeds.load(name, None, 8, 0, no_sampling)


# The configurations


@pytest.fixture(scope="module")
def parser():
    """That of `vllm serve`."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    return parser


@pytest.mark.parametrize("name", ["405b", "70b", "8b", "reference"])
def test_vllm_takes_the_configuration(parser, name):
    """All its options, by vLLM's own parser, with what icm.py needs."""
    file = FOLDER / "configs" / f"{name}.yaml"
    args = parser.parse_args(["serve", "--config", str(file)])
    assert args.enable_prefix_caching and args.enable_prompt_tokens_details
    assert args.max_logprobs == 20 and not args.disable_log_stats
    assert args.model and args.port == 8000
    if name == "reference":
        assert (Path(__file__).parents[2] / args.model / "config.json").exists()
