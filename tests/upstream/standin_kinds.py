# SPDX-License-Identifier: Apache-2.0
"""The kinds of tokenizers of the stand-in models: sizes, special tokens, templates."""

from dataclasses import dataclass, field

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3_CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
ZEPHYR_CHAT = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True)
class Kind:
    """A kind of tokenizer.

    Attributes:
        build: ``bytes``, ``pieces``, ``words`` or ``unigram``.
        size: of the vocabulary, without what a model pads it to.
        special: number by special token.
        names: ``bos_token``, ``eos_token`` and such, and further options.
        prefix, suffix: what is put before and after every text.
        visible: special tokens that stay in decoded text.

    """

    build: str
    size: int
    special: dict[str, int]
    names: dict = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    suffix: tuple[str, ...] = ()
    visible: tuple[str, ...] = ()


_LLAMA3 = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
]
_QWEN = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
_GEMMA = dict(zip(["<pad>", "<eos>", "<bos>", "<unk>"], range(4)))
_GEMMA |= {"<start_of_turn>": 105, "<end_of_turn>": 106}
_GEMMA |= {"<start_of_image>": 255999, "<end_of_image>": 256000}


def _numbered(tokens: list[str], first: int) -> dict[str, int]:
    return {token: first + place for place, token in enumerate(tokens)}


_CLS_SEP = dict(prefix=("[CLS]",), suffix=("[SEP]",))
KINDS = {
    "opt": Kind(
        "bytes",
        50265,
        {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3},
        dict(bos_token="</s>", eos_token="</s>", pad_token="<pad>", unk_token="</s>"),
        prefix=("</s>",),
    ),
    "gpt2": Kind(
        "bytes",
        50257,
        {"<|endoftext|>": 50256},
        dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    ),
    "llama3": Kind(
        "bytes",
        128256,
        _numbered(_LLAMA3, 128000),
        dict(bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>"),
        prefix=("<|begin_of_text|>",),
    ),
    "llama3-chat": Kind(
        "bytes",
        128256,
        _numbered(_LLAMA3, 128000),
        dict(
            bos_token="<|begin_of_text|>",
            eos_token="<|eot_id|>",
            chat_template=LLAMA3_CHAT,
        ),
        prefix=("<|begin_of_text|>",),
    ),
    "smollm": Kind(
        "bytes",
        49152,
        {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2},
        dict(
            bos_token="<|im_start|>",
            eos_token="<|im_end|>",
            pad_token="<|im_end|>",
            unk_token="<|endoftext|>",
            chat_template=CHATML,
        ),
    ),
    "qwen": Kind(
        "bytes",
        151669,
        _numbered(_QWEN, 151643),
        dict(eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML),
        visible=("<tool_call>", "</tool_call>", "<think>", "</think>")
        + ("<tool_response>", "</tool_response>"),
    ),
    "llama2": Kind(
        "pieces",
        32000,
        {"<unk>": 0, "<s>": 1, "</s>": 2},
        dict(
            bos_token="<s>",
            eos_token="</s>",
            unk_token="<unk>",
            chat_template=ZEPHYR_CHAT,
        ),
        prefix=("<s>",),
    ),
    "llava": Kind(
        "pieces",
        32002,
        {"<unk>": 0, "<s>": 1, "</s>": 2, "<image>": 32000, "<pad>": 32001},
        dict(
            bos_token="<s>",
            eos_token="</s>",
            unk_token="<unk>",
            pad_token="<pad>",
            image_token="<image>",
            chat_template=ZEPHYR_CHAT,
        ),
        prefix=("<s>",),
    ),
    "whisper": Kind(
        "bytes",
        51865,
        {"<|endoftext|>": 50257, "<|startoftranscript|>": 50258, "<|en|>": 50259}
        | {"<|translate|>": 50358, "<|transcribe|>": 50359, "<|notimestamps|>": 50363},
        dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    ),
    "gemma": Kind(
        "pieces",
        262144,
        _GEMMA,
        dict(
            bos_token="<bos>",
            eos_token="<eos>",
            pad_token="<pad>",
            unk_token="<unk>",
            chat_template=CHATML.replace("<|im_start|>", "<start_of_turn>").replace(
                "<|im_end|>", "<end_of_turn>"
            ),
        ),
        prefix=("<bos>",),
    ),
    "bert": Kind(
        "words",
        30522,
        {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103},
        dict(
            cls_token="[CLS]",
            sep_token="[SEP]",
            pad_token="[PAD]",
            unk_token="[UNK]",
            mask_token="[MASK]",
            model_max_length=512,
        ),
        **_CLS_SEP,
    ),
    "xlmr": Kind(
        "unigram",
        250002,
        {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 250001},
        dict(
            bos_token="<s>",
            cls_token="<s>",
            eos_token="</s>",
            sep_token="</s>",
            pad_token="<pad>",
            unk_token="<unk>",
            mask_token="<mask>",
            model_max_length=512,
        ),
        prefix=("<s>",),
        suffix=("</s>",),
    ),
}
