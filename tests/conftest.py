# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the test bed: the runner, tiny models, their oracles, shared engines.

    python -m pytest tests                  # all tests, one session a runner
    python -m pytest tests --runner v2      # one of them
    python -m pytest tests --parts 3        # three a runner, a third of the files each
    python -m pytest tests --quick          # an engine for scoring and one for depth

Whether vLLM takes its V1 or its V2 model runner is fixed when it is imported, so
each has a session of its own. A test that uses no engine, or that is marked
`any_runner`, says the same in both and runs in V1's only.
"""

import gc
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import forks
import pytest
import runners
from dealing import deal

QUICK = ("test_scoring.py", "test_scoring_engine.py", "test_scoring_top_k.py", "test_utio.py")
"""Files of which --quick runs what asks for their own `llm`, one family's engine."""

FREEZE = gc.freeze
"""As it is before `frozen_objects`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--runner",
        choices=[*runners.RUNNERS, "both"],
        default="both",
        help="vLLM's model runner; both: two sessions, one after the other",
    )
    parser.addoption(
        "--parts",
        type=int,
        default=1,
        help="sessions a runner, one after the other, each with a part of the files: "
        "a session keeps its engines, which are 12 GiB in all",
    )
    parser.addoption("--part", type=int, help="only this part, from 0 on")
    parser.addoption(
        "--quick",
        action="store_true",
        help="scoring and depth in one engine each: minutes, to see that all is well",
    )


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Makes the sessions of `--runner both` or `--parts`; says nothing otherwise."""
    options = config.option
    if options.help:
        return None
    if options.runner == "both":
        sessions = [["--runner", runner] for runner in runners.RUNNERS]
    elif options.parts > 1 and options.part is None:
        sessions = [["--part", str(part)] for part in range(options.parts)]
    else:
        return None
    # A session whose tests are all the other's collects nothing, which is no failure.
    fine = {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
    codes = []
    for session in sessions:
        arguments = [*config.invocation_params.args, *session]
        print("\n====", *session, flush=True)
        codes.append(
            subprocess.call(
                [sys.executable, "-s", "-m", "pytest", *arguments],
                cwd=config.invocation_params.dir,
            )
        )
    failed = [code for code in codes if code not in fine]
    return failed[0] if failed else min(codes)


def pytest_configure(config: pytest.Config) -> None:
    # What upstream and torch say of each other on every import.
    warning = "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
    config.addinivalue_line("filterwarnings", warning)
    config.addinivalue_line(
        "markers",
        "any_runner: needs an engine or a server, but nothing that a runner does, as a "
        "refusal of its frontend: run in V1's session only",
    )
    if config.option.runner in runners.RUNNERS:
        runners.enter(config.option.runner)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Does not import what --quick has no test of."""
    name = collection_path.name
    if config.option.quick and name.startswith("test_") and name not in QUICK:
        return True
    return None


def needs_runner(item: pytest.Item) -> bool:
    """Whether a test can say something else with the other runner."""
    marked = item.get_closest_marker("any_runner")
    return "runner" in item.fixturenames and not marked


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if config.option.quick:
        slow = [item for item in items if "llm" not in item.fixturenames]
        items[:] = [item for item in items if "llm" in item.fixturenames]
        config.hook.pytest_deselected(items=slow)
    if config.option.runner == "v2":
        shared = [item for item in items if not needs_runner(item)]
        items[:] = [item for item in items if needs_runner(item)]
        config.hook.pytest_deselected(items=shared)
    if config.option.part is not None:
        mine = deal(items, config.option.runner, config.option.parts)[config.option.part]
        others = [item for item in items if item.path not in mine]
        items[:] = [item for item in items if item.path in mine]
        config.hook.pytest_deselected(items=others)


@pytest.fixture(scope="session")
def runner(request: pytest.FixtureRequest) -> str:
    """`v1` or `v2`."""
    return request.config.option.runner


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory):
    """Folder of the tiny model of a family, made on first use."""
    from tiny_models import save_model

    return cache(lambda family: save_model(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="session")
def adapter_folders(model_folder, tmp_path_factory) -> tuple[Path, Path]:
    """Folders of a random adapter of the small Llama and of the merged model."""
    from adapters import save_adapter

    folders = tmp_path_factory.mktemp("adapter"), tmp_path_factory.mktemp("merged")
    save_adapter(model_folder("llama"), *folders)
    return folders


@pytest.fixture(scope="session")
def oracle(model_folder):
    """The `Oracle` of a family; `weights` is the precision of its weights."""
    from oracle import Oracle

    return cache(lambda family, **kw: Oracle(model_folder(family), **kw))


@pytest.fixture(scope="session")
def depth_oracle(model_folder):
    """The `DepthOracle` of a family."""
    from depth_oracle import DepthOracle

    return cache(lambda family, **kw: DepthOracle(model_folder(family), **kw))


@pytest.fixture(scope="session", autouse=True)
def process_groups() -> None:
    """Lets an in-process engine be collected while others run.

    vLLM tears down the process groups with the first engine that goes, and engines of
    one process share them: the others would then fail on every step.
    """
    from vllm.v1.engine import core

    core.cleanup_dist_env_and_memory = lambda *args, **kwargs: None


@pytest.fixture(scope="session", autouse=True)
def frozen_objects(process_groups) -> None:
    """Keeps the shared engines' objects out of the search for garbage.

    vLLM freezes all objects as an engine starts, and unfreezes all as one goes, as those
    do that a test makes for itself. Each start and end of one asks for nine searches,
    which take seconds each with all other engines' objects.
    """
    gc.freeze = gc.unfreeze = lambda: None


@pytest.fixture(scope="session", autouse=True)
def model_classes() -> None:
    """Has what vLLM asks a model's class answered here.

    It imports vLLM in another process for that, as to import a model could initialize
    CUDA, and keeps the answer by the class's name and file: not where caches are empty,
    and not when the release's file has come between.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda answer: answer()


@pytest.fixture(scope="session")
def engine(runner: str, model_folder):
    """The in-process `LLM` of a family and its options, shared by the whole session.

    The engine runs inside this process, where one starts in a third of a second.
    What differs between processes is tested in `serving/test_async_scoring.py`.
    """
    from vllm import LLM
    from vllm.distributed import parallel_state

    @cache
    def start(family: str, **options) -> LLM:
        if "moe" in family and parallel_state._EP is None:
            # The process's first engine, which makes the groups, has no experts.
            parallel_state._EP = parallel_state._TP
        llm = LLM(model=str(model_folder(family)), **(engine_options() | options))
        uses_v2 = llm.llm_engine.vllm_config.use_v2_model_runner
        assert uses_v2 == (runner == "v2"), "vLLM fell back to the other runner"
        # The next one's start collects garbage five times: not among all these.
        FREEZE()
        return llm

    yield start
    # Each engine that goes collects garbage, which takes seconds with all of them.
    gc.collect = lambda generation=2: 0


@pytest.fixture
def llm(engine):
    """The small Llama; files that need another engine have a fixture of their own."""
    return engine("llama")


@pytest.fixture
def llama(oracle):
    """What it ought to say."""
    return oracle("llama")


@pytest.fixture(scope="module")
def tensor_parallel_engine(engine):
    """As `engine`, with two workers, each a process, which end with the module's tests:
    they look for work all the time.
    """
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two processes want two cores")
    started = []

    def start(family: str, **options):
        with forks.for_engines():
            started.append(engine(family, tensor_parallel_size=2, **options))
        return started[-1]

    yield start
    for llm in started:
        llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="session")
def scoring_server(runner, model_folder, tmp_path_factory):
    """A server of the small Llama, which files of one subject each take in turn.

    It has a chat template without marks, takes others with a request, and says how much
    of a prompt was cached.
    """
    from chat_templates import PLAIN
    from live_server import live_server
    from scoring_server import OPTIONS, Server

    folder = tmp_path_factory.mktemp("serve")
    (folder / "template.jinja").write_text(PLAIN)
    options = OPTIONS | {"chat-template": folder / "template.jinja", "block-size": 32}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    arguments += ["--enforce-eager", "--enable-scale-out"]
    arguments += ["--trust-request-chat-template", "--enable-prompt-tokens-details"]
    log = folder / "log"
    with live_server(model_folder("llama"), arguments, runner, log) as started:
        yield Server(*started)


@pytest.fixture(scope="session")
def routing_server(runner, model_folder, tmp_path_factory):
    """A server of the small deep Llama, which routes steps of four sequences or more
    and audits some; files of one subject each take it in turn.

    Eager, and with UTIO_SOAK_COMPILED=1 as users compile it.
    """
    from chat_templates import PLAIN
    from live_server import live_server
    from scoring_server import OPTIONS, Server

    folder = tmp_path_factory.mktemp("routing")
    (folder / "template.jinja").write_text(PLAIN)
    options = OPTIONS | {"chat-template": folder / "template.jinja", "max-num-seqs": 12}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    if os.environ.get("UTIO_SOAK_COMPILED") != "1":
        arguments.append("--enforce-eager")
    arguments += ["--enable-utio", "--utio-bucket-cutoffs=2,4", "--no-utio-gate"]
    arguments += ["--utio-min-batch-size=4", "--utio-audit-fraction=0.05"]
    arguments.append("--enable-scale-out")
    log = folder / "log"
    with live_server(model_folder("deep_llama"), arguments, runner, log) as started:
        yield Server(*started)


@pytest.fixture
def server(scoring_server):
    """That one; files that need another have a fixture of their own."""
    return scoring_server


def engine_options() -> dict:
    """Options of a small float32 engine."""
    return dict(
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=64 * 2**20,
        seed=0,
    )
