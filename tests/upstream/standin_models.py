# SPDX-License-Identifier: Apache-2.0
"""Which stand-ins there are: a name, a Transformers configuration, a tokenizer."""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Standin:
    """A model to make.

    Attributes:
        config: the Transformers class of its configuration.
        architecture: what ``config.json`` says; a Transformers class if it has one.
        options: of the configuration.
        tokenizer: its kind, or empty for none.
        processor: of images or sound, a Transformers class and its options.
        files: further ones, JSON by name.
        weights: whether it has any; tests of configurations need none.
        generates: whether it has a generation configuration.
        dtype: of its weights.

    """

    config: str
    architecture: str
    options: dict = field(default_factory=dict)
    tokenizer: str = ""
    processor: tuple[str, dict] | None = None
    files: dict = field(default_factory=dict)
    weights: bool = True
    generates: bool = True
    dtype: str = "bfloat16"


def _decoder(config: str, tokenizer: str, architecture: str = "", **options) -> Standin:
    """A decoder with Llama's option names."""
    standard = dict(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,  # tests divide them among up to four
        num_key_value_heads=4,
    )
    name = config.removesuffix("Config")
    return Standin(
        config,
        architecture or f"{name}ForCausalLM",
        standard | options,
        tokenizer,
    )


_LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def _llama3(chat: bool, **options) -> Standin:
    standard = dict(
        vocab_size=128256,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        head_dim=64,
        rope_parameters=_LLAMA3_ROPE,
        tie_word_embeddings=True,
        bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009] if chat else 128001,
    )
    kind = "llama3-chat" if chat else "llama3"
    return _decoder("LlamaConfig", kind, **standard | options)


def _qwen(config: str, vocab_size: int = 151936, **options) -> Standin:
    standard = dict(
        vocab_size=vocab_size,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=151643,
        eos_token_id=151645,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
    )
    return _decoder(config, "qwen", **standard | options)


def _qwen3(**options) -> Standin:
    standard = dict(head_dim=128, max_position_embeddings=40960)
    return _qwen("Qwen3Config", **standard | options)


def _opt(**options) -> Standin:
    standard = dict(
        vocab_size=50272,
        hidden_size=256,
        word_embed_proj_dim=256,
        ffn_dim=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2048,
        bos_token_id=2,
        eos_token_id=2,
        pad_token_id=1,
    )
    made = standard | options
    return Standin("OPTConfig", "OPTForCausalLM", made, "opt", dtype="float16")


def _gpt2() -> Standin:
    options = dict(n_layer=2, n_embd=128, n_head=4, bos_token_id=50256)
    options |= dict(eos_token_id=50256)
    return Standin("GPT2Config", "GPT2LMHeadModel", options, "gpt2", dtype="float32")


def _bert(architecture: str, **options) -> Standin:
    standard = dict(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return Standin(
        "BertConfig",
        architecture,
        standard | options,
        "bert",
        generates=False,
        dtype="float32",
    )


def _xlmr(architecture: str, **options) -> Standin:
    standard = dict(
        vocab_size=250002,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=514,
        type_vocab_size=1,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )
    return Standin(
        "XLMRobertaConfig",
        architecture,
        standard | options,
        "xlmr",
        generates=False,
        dtype="float32",
    )


def _mistral(config: str = "MistralConfig", **options) -> Standin:
    standard = dict(
        vocab_size=32000,
        max_position_embeddings=32768,
        bos_token_id=1,
        eos_token_id=2,
        head_dim=64,
        sliding_window=None,
    )
    return _decoder(config, "llama2", **standard | options)


def _llama2(**options) -> Standin:
    standard = dict(vocab_size=32000, max_position_embeddings=2048)
    standard |= dict(bos_token_id=1, eos_token_id=2, head_dim=64)
    return _decoder("LlamaConfig", "llama2", **standard | options)


_VISION = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
)
_LLAVA = Standin(
    "LlavaConfig",
    "LlavaForConditionalGeneration",
    dict(
        image_token_index=32000,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        text_config=_llama2(vocab_size=32064, max_position_embeddings=4096).options
        | dict(model_type="llama"),
        vision_config=_VISION
        | dict(model_type="clip_vision_model", image_size=336, patch_size=14)
        | dict(projection_dim=64),
    ),
    "llava",
    processor=(
        "CLIPImageProcessor",
        dict(size=dict(shortest_edge=336), crop_size=dict(height=336, width=336)),
    ),
    files={
        "processor_config.json": dict(
            processor_class="LlavaProcessor",
            image_token="<image>",
            num_additional_image_tokens=1,
            patch_size=14,
            vision_feature_select_strategy="default",
        )
    },
    generates=False,
    dtype="float16",
)


_WHISPER = Standin(
    "WhisperConfig",
    "WhisperForConditionalGeneration",
    dict(
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
    ),
    "whisper",
    processor=("WhisperFeatureExtractor", {}),
    generates=False,
)


def _draft(standin: Standin, **options) -> Standin:
    """The configuration of a model that drafts for another."""
    made = standin.options | dict(num_hidden_layers=1) | options
    return replace(standin, options=made, weights=False)


_QWEN2_CONTEXT = dict(max_position_embeddings=131072)
MODELS = {
    "facebook/opt-125m": _opt(),
    "facebook/opt-350m": _opt(word_embed_proj_dim=64, do_layer_norm_before=False),
    "openai-community/gpt2": _gpt2(),
    "gpt2": _gpt2(),
    "distilbert/distilgpt2": _gpt2(),
    "meta-llama/Llama-3.2-1B": _llama3(chat=False),
    "meta-llama/Llama-3.2-1B-Instruct": _llama3(chat=True),
    "meta-llama/Llama-3.2-3B-Instruct": _llama3(chat=True),
    "meta-llama/Llama-3.1-8B-Instruct": _llama3(chat=True, tie_word_embeddings=False),
    "meta-llama/Meta-Llama-3.1-8B-Instruct": _llama3(
        chat=True, tie_word_embeddings=False
    ),
    "meta-llama/Meta-Llama-3-8B-Instruct": _llama3(
        chat=True,
        max_position_embeddings=8192,
        rope_parameters=dict(rope_type="default", rope_theta=500000.0),
        tie_word_embeddings=False,
        eos_token_id=128009,
    ),
    "unsloth/llama-3.2-1b-Instruct": _llama3(chat=True),
    "amd/PARD-Llama-3.2-1B": _draft(_llama3(chat=True), pard_token=128256),
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B": _draft(_llama3(chat=True)),
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": _draft(
        _llama3(chat=True), draft_vocab_size=32000
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _decoder(
        "LlamaConfig",
        "smollm",
        vocab_size=49152,
        max_position_embeddings=8192,
        head_dim=64,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "hmellor/tiny-random-LlamaForCausalLM": _llama2(),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _llama2(),
    "JackFram/llama-68m": _llama2(),
    "HuggingFaceH4/zephyr-7b-beta": _mistral(),
    "mistralai/Mistral-7B-v0.1": _mistral(sliding_window=4096),
    "mistralai/Mistral-7B-Instruct-v0.2": _mistral(),
    "mistralai/Mistral-7B-Instruct-v0.1": _mistral(sliding_window=4096),
    "TitanML/tiny-mixtral": _mistral(
        "MixtralConfig", num_local_experts=4, num_experts_per_tok=2
    ),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": _mistral(
        "MixtralConfig", num_local_experts=4, num_experts_per_tok=2
    ),
    "Qwen/Qwen1.5-7B": _qwen("Qwen2Config", tie_word_embeddings=False),
    "Qwen/Qwen2-1.5B-Instruct": _qwen("Qwen2Config"),
    "Qwen/Qwen2.5-0.5B-Instruct": _qwen("Qwen2Config"),
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen("Qwen2Config"),
    "Qwen/Qwen2.5-3B-Instruct": _qwen("Qwen2Config"),
    "Qwen/Qwen2.5-7B-Instruct": _qwen("Qwen2Config", tie_word_embeddings=False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _qwen("Qwen2Config", **_QWEN2_CONTEXT),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _qwen("Qwen2Config", **_QWEN2_CONTEXT),
    "jason9693/Qwen2.5-1.5B-apeach": _qwen(
        "Qwen2Config",
        architecture="Qwen2ForSequenceClassification",
        num_labels=2,
        pad_token_id=151643,
    ),
    "Qwen/Qwen3-0.6B": _qwen3(),
    "Qwen/Qwen3-1.7B": _qwen3(),
    "Qwen/Qwen3-4B": _qwen3(),
    "Qwen/Qwen3-8B": _qwen3(tie_word_embeddings=False),
    "Qwen/Qwen3-32B": _qwen3(tie_word_embeddings=False),
    "Qwen/Qwen3-Embedding-0.6B": _qwen3(),
    "llava-hf/llava-1.5-7b-hf": _LLAVA,
    "openai/whisper-small": _WHISPER,
    "openai/whisper-tiny": _WHISPER,
    "BAAI/bge-base-en": _bert("BertModel"),
    "BAAI/bge-base-en-v1.5": _bert("BertModel"),
    "intfloat/e5-small": _bert("BertModel"),
    "sentence-transformers/all-MiniLM-L12-v2": _bert("BertModel"),
    "sentence-transformers/all-MiniLM-L6-v2": _bert("BertModel"),
    "cross-encoder/ms-marco-MiniLM-L-6-v2": _bert(
        "BertForSequenceClassification", num_labels=1
    ),
    "intfloat/multilingual-e5-small": _xlmr("XLMRobertaModel"),
    "BAAI/bge-reranker-base": _xlmr(
        "XLMRobertaForSequenceClassification", num_labels=1
    ),
    "google/gemma-3-1b-it": _decoder(
        "Gemma3TextConfig",
        "gemma",
        "Gemma3ForCausalLM",
        vocab_size=262144,
        max_position_embeddings=32768,
        head_dim=64,
        sliding_window=512,
        bos_token_id=2,
        eos_token_id=[1, 106],
        pad_token_id=0,
    ),
    "google/gemma-2-2b": _decoder(
        "Gemma2Config",
        "gemma",
        vocab_size=262144,
        max_position_embeddings=8192,
        head_dim=64,
        sliding_window=4096,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    ),
    "deepseek-ai/DeepSeek-V2-Lite": Standin(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        dict(
            vocab_size=32000,
            hidden_size=128,
            intermediate_size=256,
            moe_intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            n_routed_experts=4,
            n_shared_experts=2,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            max_position_embeddings=163840,
            bos_token_id=1,
            eos_token_id=2,
        ),
        "llama2",
    ),
    "state-spaces/mamba-130m-hf": Standin(
        "MambaConfig",
        "MambaForCausalLM",
        dict(
            vocab_size=50280,
            hidden_size=128,
            num_hidden_layers=2,
            bos_token_id=0,
            eos_token_id=0,
        ),
        "gpt2",
        dtype="float32",
    ),
}
