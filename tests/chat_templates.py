# SPDX-License-Identifier: Apache-2.0
"""Chat templates for the tokenizer of the tiny models, and what they write."""

from tiny_models import BOS, EOS

_PLAIN = (
    "{%- for message in messages -%}"
    + BOS
    + "{{ message.role }}\n{{ message.content }}"
    + EOS
    + "\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}" + BOS + "assistant\n{%- endif -%}"
)
# Jinja strips what is between a tag with a dash and the text beside it, so line breaks
# are written as expressions.
PLAIN = _PLAIN.replace("\n", "{{ '\\n' }}")
"""As of Qwen: a header, the content, the end, a line break."""

MARKED = (
    "{%- for message in messages -%}" + BOS + "{{ message.role }}{{ '\\n' }}"
    "{%- if message.role == 'assistant' -%}"
    "{% generation %}{{ message.content }}" + EOS + "{% endgeneration %}"
    "{%- else -%}{{ message.content }}" + EOS + "{%- endif -%}{{ '\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}" + BOS + "assistant{{ '\\n' }}{%- endif -%}"
)
"""The same text, with generation marks."""

FORGETFUL = PLAIN.replace(
    "{{ message.content }}",
    "{%- if not loop.last -%}{{ message.content.split('|')[-1] }}"
    "{%- else -%}{{ message.content }}{%- endif -%}",
)
"""Leaves out the reasoning (before `|`) of all messages but the last."""


def tokens_and_spans(tokenizer, messages: list[dict]) -> tuple[list[int], list[range]]:
    """The tokens that `PLAIN` and `MARKED` write of a conversation, and where each
    message's content and end are, found without a template."""
    ids: list[int] = []
    spans = []

    def add(text: str) -> None:
        ids.extend(tokenizer.encode(text, add_special_tokens=False))

    for message in messages:
        # Nothing is joined across special tokens and line breaks.
        add(f"{BOS}{message['role']}\n")
        start = len(ids)
        add(message["content"] + EOS)
        spans.append(range(start, len(ids)))
        add("\n")
    return ids, spans


def conversation(turns: int, words: list[str] | None = None) -> list[dict]:
    """A conversation of so many turns; the texts differ."""
    words = words or [
        "import",
        "def test_that(x):",
        "return x + 1",
        "assert",
        "the end.",
    ]
    messages = [{"role": "system", "content": "You write tests."}]
    for turn in range(turns):
        for role in ("user", "assistant"):
            count = 3 + (turn * 2 + len(role)) % 4
            chosen = [words[(turn + len(role) * i) % len(words)] for i in range(count)]
            messages.append({"role": role, "content": " ".join([*chosen, str(turn)])})
    return messages
