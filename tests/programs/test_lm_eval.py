# SPDX-License-Identifier: Apache-2.0
"""`examples/lm_eval`, sample by sample, against lm-eval's own `vllm` and `hf` models.

lm-eval's `vllm` model runs on the same wheel, as lm-eval ships it.
"""

import sys
from pathlib import Path

import pytest
from scoring import FLOAT32_TOLERANCE, random_ids

lm_eval = pytest.importorskip("lm_eval")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "lm_eval"
TASKS = str(EXAMPLE / "tasks")
MODEL = ROOT / "examples" / "reference_model" / "model"
MAX_LENGTH = 1024
VOCABULARY = 4096
LIMITS = {
    "held_out_next_line": 2,
    "held_out_next_line_same_shots": 2,
    "held_out_complete_line": 4,
    "held_out_perplexity": 2,
}
"""Samples of each task."""
ENGINE = dict(
    dtype="float32",
    enforce_eager=True,
    max_num_batched_tokens=2048,
    kv_cache_memory_bytes=256 * 2**20,
    batch_size="auto",
)
TOKEN_TOLERANCE = FLOAT32_TOLERANCE
"""Most that a token's log-probability may be off, in nats. The reference model is 256
wide, of 12 layers, with logits of the size of the tiny models', which the bound is for:
twice the width and four times the layers are 1.4 * 2 times the rounding, of which the
bound leaves room for five."""


@pytest.fixture(scope="module", autouse=True)
def example_on_the_path():
    sys.path.insert(0, str(EXAMPLE))
    yield
    sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="module")
def ours():
    from utio_model import UTIO

    return UTIO(str(MODEL), **ENGINE)


@pytest.fixture(scope="module")
def theirs():
    from lm_eval.models.vllm_causallms import VLLM

    return VLLM(str(MODEL), **ENGINE)


@pytest.fixture(scope="module")
def hugging_face():
    from lm_eval.models.huggingface import HFLM

    # lm-eval's vllm model makes rolling windows two tokens shorter than the context.
    return HFLM(
        str(MODEL), dtype="float32", device="cpu", batch_size=4, max_length=1022
    )


@pytest.fixture(scope="module")
def samples():
    """What a model answers, by task, request and sample."""
    answers: dict[int, dict] = {}

    def evaluate(model) -> dict[str, list]:
        if id(model) not in answers:
            from lm_eval.tasks import TaskManager

            tasks = TaskManager(
                include_path=str(EXAMPLE / "tasks"), include_defaults=False
            )
            answers[id(model)] = {
                task: lm_eval.simple_evaluate(
                    model=model,
                    tasks=[task],
                    limit=limit,
                    task_manager=tasks,
                    bootstrap_iters=0,
                )["samples"][task]
                for task, limit in LIMITS.items()
            }
        return answers[id(model)]

    return evaluate


def num_tokens(model, text: str) -> int:
    return len(model.tok_encode(text))


def assert_same_answers(ours, sample, other) -> None:
    """Asserts that two samples have the same requests and answers."""
    assert sample["arguments"] == other["arguments"]
    for arguments, ((answer,),), ((expected,),) in zip(
        sample["arguments"], zip(sample["resps"]), zip(other["resps"]), strict=True
    ):
        text = arguments[-1] if len(arguments) == 2 else arguments[0]
        if isinstance(expected, str):
            assert answer == expected
        elif isinstance(expected, tuple):
            tolerance = num_tokens(ours, text) * TOKEN_TOLERANCE
            assert answer[0] == pytest.approx(expected[0], rel=0, abs=tolerance)
            assert answer[1] is bool(expected[1])
        else:
            tolerance = num_tokens(ours, text) * TOKEN_TOLERANCE
            assert answer == pytest.approx(expected, rel=0, abs=tolerance)


@pytest.mark.parametrize("other", ["theirs", "hugging_face"])
@pytest.mark.parametrize("task", LIMITS)
def test_samples(request, samples, ours, task, other):
    found = samples(ours)[task]
    expected = samples(request.getfixturevalue(other))[task]
    assert len(found) == LIMITS[task]
    for sample, reference in zip(found, expected, strict=True):
        assert_same_answers(ours, sample, reference)


def test_the_samples_are_of_every_kind(samples, ours):
    """What the comparison above would miss if all answers were alike."""
    found = samples(ours)
    resps = {task: [s["resps"][0][0] for s in found[task]] for task in LIMITS}
    sums = [answer[0] for answer in resps["held_out_next_line"]]
    assert len({*sums}) == len(sums) and max(sums) < 0
    assert len({*resps["held_out_complete_line"]}) > 1
    assert max(resps["held_out_perplexity"]) < -1000  # nats: whole files
    # Those of one sample have a context in common, of 16 shots.
    (first, _), (second, _) = found["held_out_next_line"][0]["arguments"][:2]
    assert first == second and first.count("\n\n") == 16


def greedy_ids(model, context: list[int], count: int) -> list[int]:
    from vllm import SamplingParams, TokensPrompt

    (output,) = model.model.generate(
        [TokensPrompt(prompt_token_ids=context)],
        SamplingParams(max_tokens=count, temperature=0, ignore_eos=True),
        use_tqdm=False,
    )
    return list(output.outputs[0].token_ids)


def test_token_requests(ours, theirs):
    """Shared and different contexts, one-token choices, greedy ones, continuations
    without a token, and prompts that must be cut, in mixed order."""
    contexts = [random_ids(n, VOCABULARY, n) for n in (1, 40, 1021, 1500)]
    pairs = []
    for context in contexts:
        best = greedy_ids(ours, context[-1000:], 3)
        for ids in ([5], best, best[:1], [7, 8, 9], [7, 8, 10], []):
            pairs.append((context, ids))
    order = random_ids(0, 2**30, len(pairs))
    requests = [(None, *pair) for _, pair in sorted(zip(order, pairs, strict=True))]
    found = ours._loglikelihood_tokens(requests, disable_tqdm=True)
    expected = theirs._loglikelihood_tokens(requests, disable_tqdm=True)
    assert {greedy for _, greedy in found} == {True, False}
    for (_, _, ids), answer, reference in zip(requests, found, expected, strict=True):
        tolerance = len(ids) * TOKEN_TOLERANCE
        assert answer[0] == pytest.approx(reference[0], rel=0, abs=tolerance)
        assert answer[1] == reference[1]


def test_a_continuation_longer_than_the_context_length(ours):
    """One token is kept as context. lm-eval's own model stops here."""
    ids = random_ids(1, VOCABULARY, 2 * MAX_LENGTH)
    cut = ids[-(MAX_LENGTH - 1) :]
    (long,) = ours._loglikelihood_tokens([(None, [5], ids)], disable_tqdm=True)
    assert ours.model.reset_prefix_cache()  # and the scores that are kept with it
    (same,) = ours._loglikelihood_tokens([(None, cut[:1], cut[1:])], disable_tqdm=True)
    assert long == same


def test_a_context_is_prefilled_once(ours):
    context = random_ids(2, VOCABULARY, 1000)
    counted = []
    generate = ours.model._run_completion

    def run(**kwargs):
        outputs = generate(**kwargs)
        counted.extend(o.num_cached_tokens or 0 for o in outputs)
        return outputs

    ours.model._run_completion = run
    try:
        requests = [(None, context, [5, n, n]) for n in range(4)]
        ours._loglikelihood_tokens(requests, disable_tqdm=True)
    finally:
        del ours.model._run_completion
    block = ours.model.llm_engine.vllm_config.cache_config.block_size
    assert counted == [0] + [999 // block * block] * 3


def test_answers_are_cached_as_lm_evals(ours, tmp_path, monkeypatch):
    """`--use_cache` of lm-eval keeps what this model answers."""
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import CachingLM

    requests = [
        Instance("loglikelihood", {}, ("def f(x):", text), i)
        for i, text in enumerate(["\n    return x", " pass"])
    ]
    cached = CachingLM(ours, str(tmp_path / "cache.db"))
    first = cached.loglikelihood(requests)

    def fail(*args, **kwargs):
        raise AssertionError("asked the model")

    monkeypatch.setattr(ours, "_loglikelihood_tokens", fail)
    assert [tuple(a) for a in cached.loglikelihood(requests)] == first


def test_data_parallel_is_refused():
    from utio_model import UTIO

    with pytest.raises(ValueError, match="data_parallel_size"):
        UTIO(str(MODEL), data_parallel_size=2)


def test_command_line(capsys, monkeypatch):
    """The README's command, of two samples."""
    import run

    options = "enforce_eager=True,dtype=float32,kv_cache_memory_bytes=134217728"
    arguments = [
        *("run.py", "run", "--model", "utio", "--tasks", "held_out_next_line"),
        *("--model_args", f"pretrained={MODEL},{options}", "--limit", "2"),
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    run.main()
    assert "|held_out_next_line|" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "--tasks", "a"], ["run", "--include_path", TASKS, "--tasks", "a"]),
        (["--tasks", "a"], ["run", "--include_path", TASKS, "--tasks", "a"]),
        (["run", "--config", "my.yaml"], ["run", "--config", "my.yaml"]),
        (["run", "-C", "my.yaml"], ["run", "-C", "my.yaml"]),
        (["ls", "tasks"], ["ls", "tasks"]),
        (["--help"], ["--help"]),
        ([], []),
    ],
)
def test_the_tasks_of_the_folder_are_known(words, expected, monkeypatch):
    """A --config may name its own."""
    import run

    seen = []
    monkeypatch.setattr(run, "cli_evaluate", lambda: seen.extend(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    run.main()
    assert seen == expected
