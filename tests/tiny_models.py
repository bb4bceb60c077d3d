# SPDX-License-Identifier: Apache-2.0
"""Random tiny models of the four families, each with a tokenizer of its own.

`wide` is a second Llama, with a vocabulary of realistic size. The `deep_` ones have
six layers for depth routing. `OTHERS` are models that scoring takes as they come.
"""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    GraniteConfig,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1
MAX_POSITIONS = 512
SPREAD = 0.15
"""Standard deviation of the random weights. Transformers' 0.02 gives a distribution
so flat that a wrong hidden state would hardly show; at 0.15 the logits of a model
128 wide spread over about ±8."""
TWINS = (20, 21)
"""Two tokens of the Llama whose rows of the head are equal, so that their logits
tie."""

_ENDS = dict(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=EOS_ID)
_DECODER = dict(
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=MAX_POSITIONS,
    initializer_range=SPREAD,
    **_ENDS,
)
_OPT = dict(
    hidden_size=128,
    ffn_dim=256,
    num_attention_heads=4,
    max_position_embeddings=MAX_POSITIONS,
    init_std=SPREAD,
    **_ENDS,
    dropout=0.0,
)
_DEEP = dict(vocab_size=512, num_hidden_layers=6)
_WINDOWS = dict(head_dim=32, query_pre_attn_scalar=32, sliding_window=48)
CONFIGS = {
    # 1000 and 777 are no multiples of 64, vLLM pads both vocabularies.
    "llama": LlamaConfig(vocab_size=1000, num_hidden_layers=3, **_DECODER),
    "wide": LlamaConfig(vocab_size=40_001, num_hidden_layers=2, **_DECODER),
    "qwen2": Qwen2Config(
        vocab_size=512, num_hidden_layers=2, tie_word_embeddings=True, **_DECODER
    ),
    "qwen3": Qwen3Config(
        vocab_size=777,
        num_hidden_layers=2,
        tie_word_embeddings=True,
        head_dim=64,  # twice hidden_size / num_attention_heads
        **_DECODER,
    ),
    "opt": OPTConfig(
        vocab_size=640, num_hidden_layers=2, word_embed_proj_dim=128, **_OPT
    ),
    "deep_llama": LlamaConfig(**_DEEP, **_DECODER),
    "deep_mistral": MistralConfig(sliding_window=48, **_DEEP, **_DECODER),
    "deep_qwen2": Qwen2Config(tie_word_embeddings=True, **_DEEP, **_DECODER),
    "deep_qwen3": Qwen3Config(head_dim=64, **_DEEP, **_DECODER),
    "deep_qwen3_moe": Qwen3MoeConfig(
        head_dim=64,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        **_DEEP,
        **_DECODER,
    ),
    # Two groups of KV caches with windows and one without.
    "deep_gemma3": Gemma3TextConfig(
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        **_WINDOWS,
        **_DEEP,
        **_DECODER,
    ),
    "deep_opt": OPTConfig(word_embed_proj_dim=128, **_DEEP, **_OPT),
    # As OPT 350m: norms after the sums, no final one, narrower embeddings.
    "deep_opt_post": OPTConfig(
        do_layer_norm_before=False, word_embed_proj_dim=64, **_DEEP, **_OPT
    ),
}

_OTHER = dict(vocab_size=600, num_hidden_layers=2, **_DECODER)
_GPT = dict(
    vocab_size=600,
    n_layer=2,
    n_embd=128,
    n_head=4,
    n_positions=MAX_POSITIONS,
    initializer_range=SPREAD,
    **_ENDS,
)
OTHERS = {
    # What the logits go through after the head: a scale, a divisor, a soft cap, a bias.
    "cohere": CohereConfig(logit_scale=0.25, **_OTHER),
    "granite": GraniteConfig(logits_scaling=4.0, residual_multiplier=0.5, **_OTHER),
    "gemma2": Gemma2Config(final_logit_softcapping=3.0, **_WINDOWS, **_OTHER),
    "gptj": GPTJConfig(rotary_dim=16, tie_word_embeddings=False, **_GPT),
    # What a position is computed from: windows beside whole attention, learned
    # positions, a recurrent state, experts.
    "gemma3_text": Gemma3TextConfig(**_WINDOWS, **_OTHER | {"num_hidden_layers": 6}),
    "gpt2": GPT2Config(**_GPT),
    "mamba2": Mamba2Config(
        vocab_size=600,
        hidden_size=128,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=64,
        n_groups=1,
        initializer_range=SPREAD,
        **_ENDS,
    ),
    "qwen2_moe": Qwen2MoeConfig(
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        **_OTHER,
    ),
}

NUMPY = Path(np.lib.__file__).parent
SHORT_TEXTS = [NUMPY / name for name in ("_ufunclike_impl.py", "mixins.py", "_user_array_impl.py")]
"""Some 20,000 characters of Python."""


@cache
def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most 500 tokens, fewer than any model's vocabulary, trained on
    tests of the NumPy that is locked: a change of these tests does not change it."""
    texts = [path.read_text() for path in sorted(NUMPY.glob("tests/test_*.py"))]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts, vocab_size=500, special_tokens=[BOS, EOS], show_progress=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token=BOS, eos_token=EOS, pad_token=EOS
    )


def save_model(family: str, folder: Path) -> Path:
    """Writes the family's float32 weights, configuration and tokenizer.

    Weights are normal with deviation `SPREAD`; norms and biases, which Transformers
    starts at exactly 1 and 0, are moved off those values so that a dropped one shows.

    Returns:
        `folder`.
    """
    torch.manual_seed(0)
    config = (CONFIGS | OTHERS)[family]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=SPREAD)
        if family == "llama":
            head = model.lm_head.weight
            head[TWINS[1]] = head[TWINS[0]]
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
