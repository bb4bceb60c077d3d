# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of the kinds that the stand-in models need.

Each is trained on upstream's own documentation, and its vocabulary is filled up to
the size of the real one, with the special tokens at their real numbers: whatever token
a random model samples has a text, and tests that name a token's number find it.
"""

import json
from functools import cache
from pathlib import Path

from tests.upstream.standin_kinds import KINDS, Kind
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TRAINED = 6000
"""Tokens that are learnt; more make no better stand-in, and take longer."""
_TEXT_BYTES = 3_000_000


@cache
def _texts() -> tuple[str, ...]:
    from tests.upstream import sides

    docs = Path(sides.unpatched().tests, "docs")
    texts, left = [], _TEXT_BYTES
    for path in sorted(docs.rglob("*.md")):
        if left > 0:
            texts.append(path.read_text())
            left -= len(texts[-1])
    return tuple(texts)


def _vocabulary(kind: Kind, learnt: list[str], mark: str) -> dict[str, int]:
    """Special tokens at their numbers, learnt ones from the lowest free one on."""
    taken = set(kind.special.values())
    free = (number for number in range(kind.size) if number not in taken)
    found = dict(kind.special)
    found.update((token, next(free)) for token in learnt if token not in kind.special)
    found.update((f"{mark}word{number}", number) for number in free)
    return found


@cache
def _learn_bytes() -> tuple[list[str], list[tuple[str, str]]]:
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator(_texts(), trainer)
    return _learnt(learner)


@cache
def _learn_pieces() -> tuple[list[str], list[tuple[str, str]]]:
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED, limit_alphabet=200, show_progress=False
    )
    learner.train_from_iterator(_texts(), trainer)
    return _learnt(learner)


def _learnt(learner: Tokenizer) -> tuple[list[str], list[tuple[str, str]]]:
    """The tokens of a BPE by number, and its merges."""
    model = json.loads(learner.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [tuple(merge) for merge in model["merges"]]


def byte_level(kind: Kind) -> Tokenizer:
    """As GPT-2's: BPE of bytes."""
    tokens, merges = _learn_bytes()
    made = Tokenizer(models.BPE(_vocabulary(kind, tokens, "Ġ"), merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def pieces(kind: Kind) -> Tokenizer:
    """As Llama 2's: BPE of characters, with bytes for the characters it lacks."""
    tokens, merges = _learn_pieces()
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + tokens
    vocabulary = _vocabulary(kind, tokens, "▁")
    options = dict(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made = Tokenizer(models.BPE(vocabulary, merges, **options))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def words(kind: Kind) -> Tokenizer:
    """As BERT's."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=TRAINED, show_progress=False)
    made.train_from_iterator(_texts(), trainer)
    tokens = sorted(made.get_vocab(), key=made.get_vocab().get)
    made.model = models.WordPiece(_vocabulary(kind, tokens, ""), unk_token="[UNK]")
    made.decoder = decoders.WordPiece()
    return made


def unigram(kind: Kind) -> Tokenizer:
    """As XLM-RoBERTa's."""
    tokens, _ = _learn_pieces()
    vocabulary = _vocabulary(kind, tokens, "▁")
    ordered = sorted(vocabulary, key=vocabulary.get)
    scores = [(token, -0.001 * place) for place, token in enumerate(ordered)]
    made = Tokenizer(models.Unigram(scores, unk_id=kind.special["<unk>"]))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return made


@cache
def make(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a kind."""
    kind = KINDS[name]
    build = dict(bytes=byte_level, pieces=pieces, words=words, unigram=unigram)
    made = build[kind.build](kind)
    for token in kind.special:
        special = token not in kind.visible
        added = AddedToken(token, special=special, normalized=False)
        (made.add_special_tokens if special else made.add_tokens)([added])
    if kind.prefix or kind.suffix:
        around = processors.TemplateProcessing(
            single=[*kind.prefix, "$A", *kind.suffix],
            pair=[*kind.prefix, "$A", *kind.suffix, "$B:1"]
            + [f"{token}:1" for token in kind.suffix],
            special_tokens=[
                (token, kind.special[token]) for token in {*kind.prefix, *kind.suffix}
            ],
        )
        level = processors.ByteLevel(trim_offsets=False)
        byte = kind.build == "bytes"
        made.post_processor = processors.Sequence([level, around]) if byte else around
    return PreTrainedTokenizerFast(tokenizer_object=made, **kind.names)
