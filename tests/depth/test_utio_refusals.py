# SPDX-License-Identifier: Apache-2.0
"""What an engine with depth routing may not be: each is refused at start, by name.

Most of it is known from the options alone. The rest needs a worker, and a failed one
takes those of other engines in its process with it, so it has a process of its own.
"""

import json
from pathlib import Path

import forks
import pytest
import runners
import torch
from conftest import engine_options
from depth_cutoffs import ABOUT, save_probes
from depth_routing import CUTOFFS, NUM_LAYERS
from release import PRELUDE
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, make_tokenizer
from transformers import (
    FalconH1Config,
    GPT2Config,
    MambaConfig,
    Phi3Config,
    WhisperConfig,
)

SMALL = dict(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=1,
)
MODELS = {
    "MambaForCausalLM": MambaConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=4
    ),
    "FalconH1ForCausalLM": FalconH1Config(
        mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, **SMALL
    ),
    "WhisperForConditionalGeneration": WhisperConfig(
        vocab_size=512, d_model=64, encoder_layers=2, decoder_layers=4
    ),
}
STARTED_MODELS = {
    "GPT2LMHeadModel": GPT2Config(vocab_size=512, n_embd=128, n_layer=4, n_head=4),
    # To vLLM a subclass of Llama, whose layers may be of any kind.
    "Phi3ForCausalLM": Phi3Config(**SMALL),
}
POLICIES = [
    "nowhere.Policy",
    "depth_routing.Nothing",
    "depth_routing",
    "depth_routing.CUTOFFS",
    "depth_routing.serve",
]


def save(folder: Path, architecture: str, config) -> str:
    """The folder of a model without weights."""
    folder.mkdir()
    config.architectures = [architecture]
    config.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def disable_envs_cache() -> None:
    """An engine that was started before has filled it."""
    from vllm import envs

    envs.disable_envs_cache()


def configure(model: str, **options):
    """What `LLM(...)` and `vllm serve` do first."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=model, enforce_eager=True, **options).create_engine_config()


REFUSED = [
    (dict(pipeline_parallel_size=2), "pipeline.parallel"),
    (dict(enable_lora=True), "(?i)lora"),
    (
        dict(
            speculative_config=dict(
                method="ngram", num_speculative_tokens=2, prompt_lookup_max=3
            )
        ),
        "speculative",
    ),
    (
        dict(
            kv_transfer_config=dict(kv_connector="ExampleConnector", kv_role="kv_both")
        ),
        "(?i)kv.*(connector|transfer)",
    ),
    (dict(kv_sharing_fast_prefill=True), "kv.sharing.fast.prefill"),
    (dict(utio_bucket_cutoffs=()), "utio_bucket_cutoffs"),
    (dict(utio_bucket_cutoffs=(0, 2)), "utio_bucket_cutoffs"),
    (dict(utio_bucket_cutoffs=(-1,)), "utio_bucket_cutoffs"),
    (dict(utio_bucket_cutoffs=(4, 2)), "utio_bucket_cutoffs"),
    (dict(utio_bucket_cutoffs=(2, 2)), "utio_bucket_cutoffs"),
    (dict(utio_bucket_cutoffs=(2, 7)), "utio_bucket_cutoffs"),
    (dict(utio_bucket_cutoffs=(2.5,)), "bucket_cutoffs"),
    (dict(utio_bucket_cutoffs=("two",)), "bucket_cutoffs"),
    (dict(utio_bucket_cutoffs=2), "bucket_cutoffs"),
    (dict(utio_min_bucket=0), "min_bucket"),
    (dict(utio_min_depth=0), "min_depth"),
    (dict(utio_min_depth=NUM_LAYERS + 1), "utio_min_depth"),
    (dict(utio_min_batch_size=0), "min_batch_size"),
    (dict(utio_min_batch_size="many"), "min_batch_size"),
    (dict(utio_score_weights=(1.0,)), "utio_score_weights"),
    (dict(utio_score_weights=(1.0, -1.0, 1.0)), "utio_score_weights"),
    (dict(utio_score_weights=(0.0, 0.0, 0.0)), "utio_score_weights"),
    (dict(utio_score_weights=(float("nan"), 1.0, 1.0)), "utio_score_weights"),
    (dict(utio_score_weights=(float("inf"), 1.0, 1.0)), "utio_score_weights"),
    (dict(utio_bucket_shares=(0.5, 0.5)), "utio_bucket_shares"),
    (dict(utio_bucket_shares=(0.5, 0.6, -0.1)), "utio_bucket_shares"),
    (dict(utio_bucket_shares=(0.5, 0.5, 0.5)), "utio_bucket_shares"),
    (dict(utio_bucket_shares=(float("nan"), 0.5, 0.5)), "utio_bucket_shares"),
    (dict(enable_utio=False, utio_bucket_cutoffs=(2, 4)), "enable.utio"),
]


@pytest.mark.parametrize(
    ("options", "name"), REFUSED, ids=[json.dumps(o)[:60] for o, _ in REFUSED]
)
def test_an_option_is_refused(model_folder, options, name):
    given = dict(enable_utio=True, utio_bucket_cutoffs=CUTOFFS[:-1]) | options
    with pytest.raises(ValueError, match=name):
        configure(str(model_folder("deep_llama")), **given)


VARIABLES = {
    # It cannot read the depths of tokens.
    "VLLM_USE_RUST_FRONTEND": "enable.utio.*Rust",
    # Tokens are ranked within their batch.
    "VLLM_BATCH_INVARIANT": "enable.utio.*VLLM_BATCH_INVARIANT",
}


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_is_refused(model_folder, monkeypatch, variable):
    disable_envs_cache()
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ValueError, match=VARIABLES[variable]):
        configure(str(model_folder("deep_llama")), enable_utio=True)


def test_segments_that_would_share_a_trace_are_not_compiled(model_folder, monkeypatch):
    from vllm.config import CompilationMode
    from vllm.engine.arg_utils import EngineArgs

    def mode() -> CompilationMode:
        disable_envs_cache()
        args = EngineArgs(model=str(model_folder("deep_llama")), enable_utio=True)
        return args.create_engine_config().compilation_config.mode

    assert mode() != CompilationMode.NONE
    monkeypatch.setenv("VLLM_USE_BYTECODE_HOOK", "0")
    assert mode() == CompilationMode.NONE


@pytest.mark.parametrize("architecture", MODELS)
def test_a_model_is_refused(tmp_path, architecture):
    folder = save(tmp_path / "model", architecture, MODELS[architecture])
    configure(folder)
    with pytest.raises(ValueError, match="enable.utio"):
        configure(folder, enable_utio=True)


PROGRAM = PRELUDE + """
import json, sys
from vllm import LLM

messages = []
for job in json.load(open(sys.argv[1])):
    try:
        LLM(**job)
        messages.append("started")
    except (ValueError, TypeError) as error:
        messages.append(f"{type(error).__name__}: {error}")
json.dump(messages, open(sys.argv[2], "w"))
"""


def test_what_only_a_worker_knows_is_refused(model_folder, tmp_path):
    options = engine_options() | dict(
        load_format="dummy", enable_utio=True, max_model_len=128
    )
    jobs = [
        options | dict(model=save(tmp_path / n, n, c))
        for n, c in STARTED_MODELS.items()
    ]
    llama = str(model_folder("deep_llama"))
    jobs += [options | dict(model=llama, utio_policy=policy) for policy in POLICIES]
    calibration = calibration_of_another_model(tmp_path)
    fitted = dict(utio_calibration=calibration, utio_bucket_cutoffs=CUTOFFS[:-1])
    for load_format in ("auto", "dummy"):
        jobs.append(options | dict(model=llama, load_format=load_format) | fitted)
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = runners.environment("v1", [Path(__file__).parents[1]])
    command = ["program.py", "jobs.json", "messages.json"]
    done = forks.run(command, environment, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    messages = json.loads((tmp_path / "messages.json").read_text())
    for architecture, message in zip(STARTED_MODELS, messages):
        assert "--enable-utio" in message, (architecture, message)
    *refused, other_model, still_to_come = messages[len(STARTED_MODELS) :]
    for policy, message in zip(POLICIES, refused, strict=True):
        assert message.startswith(f"ValueError: utio_policy '{policy}'"), message
    assert "utio_calibration" in other_model and "another model" in other_model
    assert still_to_come == "started", "its weights are not those that were fitted"


def calibration_of_another_model(folder) -> str:
    """Of one with the same shapes but other weights."""
    hidden_size = CONFIGS["deep_llama"].hidden_size
    file = save_probes(folder, hidden_size)
    embeddings = {
        "token_ids": torch.tensor([1, 100, 500]),
        "token_embeddings": torch.randn(3, hidden_size),
    }
    about = dict(zip(("format", "cutoffs", "num_layers"), ABOUT))
    save_file(load_file(file) | embeddings, file, about)
    return file


def test_the_command_line_takes_what_llm_takes(model_folder):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = (
        "--enable-utio --utio-bucket-cutoffs 2,4 --utio-min-bucket 3 "
        "--utio-min-depth 2 --utio-min-batch-size 5 "
        "--utio-policy depth_routing.Planted --utio-score-weights 1,0,2.5 "
        "--no-utio-gate --utio-audit-fraction 0.5 --utio-audit-min-agreement 0.9"
    )
    folder = str(model_folder("deep_llama"))
    args = parser.parse_args(["--model", folder, *flags.split()])
    config = EngineArgs.from_cli_args(args).create_engine_config()
    utio = config.utio_config
    assert utio.cutoffs == list(CUTOFFS)
    assert (utio.min_bucket, utio.min_depth, utio.min_batch_size) == (3, 2, 5)
    assert utio.policy == "depth_routing.Planted"
    assert utio.score_weights == [1, 0, 2.5]
    assert (utio.gate, utio.audit_fraction, utio.audit_min_agreement) == (
        False,
        0.5,
        0.9,
    )
    # Compiled by segments, but not where the whole model would be traced.
    assert not config.model_config.enforce_eager
    assert config.compilation_config.mode.name == "DYNAMO_TRACE_ONCE"
    stock = EngineArgs(model=folder, enable_utio=True, compilation_config={"mode": 1})
    config = stock.create_engine_config()
    assert config.model_config.enforce_eager
    assert config.compilation_config.mode.name == "NONE"
    assert EngineArgs(model=folder).create_engine_config().utio_config is None


def test_the_full_depth_is_implied(model_folder):
    from vllm.engine.arg_utils import EngineArgs

    folder = str(model_folder("deep_llama"))
    for cutoffs in (CUTOFFS[:-1], CUTOFFS):
        args = EngineArgs(model=folder, enable_utio=True, utio_bucket_cutoffs=cutoffs)
        assert args.create_engine_config().utio_config.cutoffs == list(CUTOFFS)
