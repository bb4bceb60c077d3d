# SPDX-License-Identifier: Apache-2.0
"""`LLM.score_chat`: messages of a conversation against Hugging Face: its templates'
masks, and float32 log-softmax."""

import numpy as np
import pytest
from chat_templates import FORGETFUL, MARKED, PLAIN, conversation, tokens_and_spans
from scoring import assert_options, assert_scores, random_ids
from tiny_models import EOS_ID, make_tokenizer
from tokenizers.processors import TemplateProcessing

TOKENIZER = make_tokenizer()


def assert_messages(scores, llama, messages: list[dict], chosen: list[int]) -> None:
    """Asserts that the scores are those of the chosen messages' tokens."""
    ids, spans = tokens_and_spans(TOKENIZER, messages)
    assert [score.message for score in scores] == chosen
    for score in scores:
        span = spans[score.message]
        assert score.token_ids == ids[span.start : span.stop]
        assert score.token_ids[-1] == EOS_ID
        prompt, targets = ids[: span.stop], ids[span.start : span.stop]
        assert_scores(score.target_logprobs, llama, prompt, targets)
        expected = llama.scores(prompt, targets)
        assert abs(score.logprob_sum - expected.logprobs.sum()) < 1e-4 * len(span)
        assert score.is_greedy == bool((expected.ranks == 1).all())


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize("which", ["last", "assistant"])
def test_messages(llm, llama, template, which):
    messages = conversation(3)
    scores = llm.score_chat(messages, which, chat_template=template)
    assert_messages(scores, llama, messages, [6] if which == "last" else [2, 4, 6])


def test_the_tokens_are_those_of_transformers_mask(llm):
    messages = conversation(3)
    encoded = TOKENIZER.apply_chat_template(
        messages,
        chat_template=MARKED,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    mask = np.array(encoded["assistant_masks"], dtype=bool)
    for template in (PLAIN, MARKED):
        scores = llm.score_chat(messages, "assistant", chat_template=template)
        found = np.zeros_like(mask)
        for score in scores:
            start = score.target_logprobs.start
            found[start : start + len(score.token_ids)] = True
        np.testing.assert_array_equal(found, mask)


def test_several_conversations_at_once(llm, llama):
    several = [conversation(turns) for turns in (1, 2, 3)]
    for messages, scores in zip(
        several, llm.score_chat(several, "assistant", chat_template=PLAIN), strict=True
    ):
        chosen = [*range(2, len(messages), 2)]
        assert_messages(scores, llama, messages, chosen)


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_special_tokens_are_the_templates(llm, llama, template, monkeypatch):
    """As in a multimodal model, whose tokenizer adds some by default."""
    tokenizer = llm.get_tokenizer().backend_tokenizer
    begin = TemplateProcessing("<s> $A", special_tokens=[("<s>", EOS_ID)])
    monkeypatch.setattr(tokenizer, "post_processor", begin)
    default = llm.renderer.default_chat_tok_params.with_kwargs(add_special_tokens=True)
    monkeypatch.setattr(llm.renderer, "default_chat_tok_params", default)
    messages = conversation(2)
    scores = llm.score_chat(messages, "assistant", chat_template=template)
    assert_messages(scores, llama, messages, [2, 4])


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_temperature_and_top_k(llm, llama, template):
    messages = conversation(2)
    ids, spans = tokens_and_spans(TOKENIZER, messages)
    options = {"temperature": 2.0, "top_k": 5}
    for score in llm.score_chat(
        messages,
        "assistant",
        chat_template=template,
        target_temperature=2.0,
        target_top_k=5,
    ):
        span = spans[score.message]
        prompt, targets = ids[: span.stop], ids[span.start : span.stop]
        assert_options(score.target_logprobs, llama, prompt, targets, **options)


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize("which", ["last", "assistant"])
def test_a_growing_conversation_computes_what_is_new(engine, llama, template, which):
    """Each turn costs its own tokens and two blocks at most."""
    block = 32
    llm = engine("llama", block_size=block, max_model_len=512)
    llm.reset_prefix_cache()
    messages = conversation(7)
    before = 0
    for turn in range(1, 8):
        part = messages[: 1 + 2 * turn]
        scores = llm.score_chat(part, which, chat_template=template)
        assert_messages(scores, llama, part, [s.message for s in scores])
        assert len(scores) == (1 if which == "last" else turn)
        length = tokens_and_spans(TOKENIZER, part)[1][-1].stop
        computed = length - scores[0].num_cached_tokens
        assert computed <= length - before + 2 * block
        before = length
    assert before > 6 * block and scores[0].num_cached_tokens > 3 * block


def test_marks_need_not_be_whole_messages(llm, llama):
    """What a template marks is scored, though it be in the middle of a message."""
    template = MARKED.replace(
        "{% generation %}{{ message.content }}",
        "Well. {% generation %}{{ message.content }}",
    )
    messages = conversation(2)
    encoded = TOKENIZER.apply_chat_template(
        messages,
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids, mask = encoded["input_ids"], np.array(encoded["assistant_masks"])
    scores = llm.score_chat(messages, "assistant", chat_template=template)
    assert sum(len(score.token_ids) for score in scores) == mask.sum()
    for score in scores:
        start = score.target_logprobs.start
        stop = start + len(score.token_ids)
        assert mask[start:stop].all() and not mask[start - 1] and not mask[stop]
        assert_scores(score.target_logprobs, llama, ids[:stop], ids[start:stop])


def test_a_template_that_rewrites_earlier_messages(llm, llama):
    """Its last message can be told, those before not."""
    messages = conversation(2)
    for message in messages[2::2]:
        message["content"] = f"I think so.|{message['content']}"
    (score,) = llm.score_chat(messages, chat_template=FORGETFUL)
    text = TOKENIZER.decode(score.token_ids)
    assert text == messages[-1]["content"] + "</s>"
    refuses(llm, "score_messages", messages, "assistant", chat_template=FORGETFUL)


def refuses(llm, parameter: str, *args, **kwargs) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError) as error:
        llm.score_chat(*args, **kwargs)
    assert error.value.parameter == parameter, error.value
    assert parameter in str(error.value)


def test_refusals(llm):
    good = conversation(1)
    user, assistant = good[1:]
    for messages in ([], "x", [user], [*good, user]):
        refuses(llm, "messages", messages, chat_template=PLAIN)
    refuses(llm, "messages", [user, user], "assistant", chat_template=PLAIN)
    refuses(llm, "messages", [assistant], chat_template=PLAIN)
    for which in ("all", None, 1, ["last"]):
        refuses(llm, "score_messages", good, which, chat_template=PLAIN)
    # A line break that is joined with the one before the message.
    begins = [user, {"role": "assistant", "content": "\n\n    x"}]
    header = TOKENIZER.encode("<s>assistant\n")
    if TOKENIZER.encode("<s>assistant\n\n\n    x")[: len(header)] != header:
        refuses(llm, "score_messages", begins, chat_template=PLAIN)
    # No stretch for an empty message.
    empty = [user, {"role": "assistant", "content": ""}]
    bare = MARKED.replace("</s>{% endgeneration %}", "{% endgeneration %}</s>")
    refuses(llm, "score_messages", empty, chat_template=bare)
    for name, values in {
        "target_temperature": (0, -1.0, float("nan"), "1", True),
        "target_top_k": (0, -1, 21, 1.5, "1", True),
    }.items():
        for value in values:
            refuses(llm, name, good, chat_template=PLAIN, **{name: value})
    # The engine goes on.
    assert llm.score_chat(good, chat_template=PLAIN)[0].message == 2


def test_a_conversation_that_is_too_long(llm):
    from vllm.exceptions import VLLMValidationError

    long = [
        {"role": "user", "content": TOKENIZER.decode(random_ids(0, 500, 300))},
        {"role": "assistant", "content": "x"},
    ]
    with pytest.raises(VLLMValidationError, match="256"):
        llm.score_chat(long, chat_template=PLAIN)
