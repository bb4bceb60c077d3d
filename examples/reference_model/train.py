# SPDX-License-Identifier: Apache-2.0
"""Trains the reference model: a small Llama whose intermediate layers can exit.

    python examples/reference_model/train.py --archive build/downloads/vllm-0.32.0.tar.gz

Beside its own loss, each step has the loss of one early exit through the shared final
norm and head, as LayerSkip has (Elhoushi et al. 2024, arXiv:2404.16710): after a
quarter of the layers in every other step, else after each number of layers by turns.
`--recipe plain` trains the same model without early exits. The layers' matrices are
trained with Muon (`torch.optim.Muon`), all else with AdamW. An interrupted run goes on
from its last checkpoint.
"""

import argparse
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import PACKAGES, read, read_packages
from tokenizers import ByteLevelBPETokenizer
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"
LAYERS = 12
VOCABULARY = 4096
CONTEXT = 1024
EXIT_WEIGHT = 0.25
"""The early exit's share of the loss."""
OTHER_PACKAGES = 0.3
"""Share of the windows that come from packages other than vLLM."""
CHECKPOINT_EVERY = 100


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--archive", type=Path, required=True)
    parser.add_argument("--out", type=Path,
                        help="default: a folder named as the recipe, in --work")  # fmt: skip
    parser.add_argument("--recipe", choices=["exits", "plain"], default="exits")
    parser.add_argument("--steps", type=int, default=2800)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--float32", action="store_true",
                        help="products in float32: a third of the time where the CPU has "
                             "no instructions for bfloat16")  # fmt: skip
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("build/reference_model"),
                        help="checkpoints and the tokenised corpus")  # fmt: skip
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps has to be at least 1")
    if args.tokens_per_step < CONTEXT:
        parser.error(f"--tokens-per-step has to be at least {CONTEXT}, a window's")
    return args


def check_same(found: dict, wanted: dict, file: Path) -> None:
    """Ends the program if a file that is there was made with other options."""
    for name, value in wanted.items():
        if found.get(name) != value:
            option = "--" + name.replace("_", "-")
            sys.exit(f"{file} was made with {option} {found.get(name)}, now it is "
                     f"{value}: remove it, or name another --work")  # fmt: skip


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts, vocab_size=VOCABULARY, special_tokens=[END], show_progress=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def tokenize(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Concatenates the texts, each after an end-of-text token. int32 `[tokens]`."""
    ids: list[int] = []
    for start in tqdm(range(0, len(texts), 256), desc="tokenise", mininterval=10):
        batch = tokenizer(texts[start : start + 256], add_special_tokens=False)
        for row in batch["input_ids"]:
            ids.append(tokenizer.eos_token_id)
            ids.extend(row)
    return torch.tensor(ids, dtype=torch.int32)


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=CONTEXT,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=None,
        )
    )


def forward(
    model: LlamaForCausalLM, ids: torch.Tensor, exits: tuple[int, ...]
) -> list[torch.Tensor]:
    """Runs the layers and keeps the states at the asked exits.

    Args:
        model: the model.
        ids: int64 `[sequences, positions]`.
        exits: numbers of layers run, ascending, 1 to `LAYERS`.

    Returns:
        Per exit the normalised hidden state, float32 `[sequences, positions, hidden]`.
    """
    hidden = model.model.embed_tokens(ids)
    position_ids = torch.arange(ids.shape[1])[None]
    rotary = model.model.rotary_emb(hidden, position_ids)
    states = []
    for index, layer in enumerate(model.model.layers):
        hidden = layer(hidden, position_embeddings=rotary)
        if index + 1 in exits:
            states.append(model.model.norm(hidden))
    return states


def cross_entropy(model: LlamaForCausalLM, state: torch.Tensor, targets: torch.Tensor):
    logits = model.lm_head(state.flatten(0, 1))
    return F.cross_entropy(logits, targets.flatten())


def exit_of(step: int) -> int:
    """Number of layers after which the early exit of a step is."""
    return LAYERS // 4 if step % 2 else step // 2 % (LAYERS - 1) + 1


def make_optimizers(model: LlamaForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim <= 1]
    embeddings = [model.model.embed_tokens.weight]
    return [
        torch.optim.Muon(
            matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(
            [{"params": embeddings, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
            lr=lr,
            betas=(0.9, 0.95),
            fused=True,
        ),
    ]  # fmt: skip


def draw_windows(tokens: torch.Tensor, number: int, length: int) -> torch.Tensor:
    """Windows at random places of `tokens`. int64 `[number, length + 1]`."""
    starts = torch.randint(len(tokens) - length - 1, (number,))
    return torch.stack([tokens[s : s + length + 1] for s in starts.tolist()]).long()


def train(
    args: argparse.Namespace, tokenizer, tokens: torch.Tensor, others: torch.Tensor
):
    torch.manual_seed(args.seed)
    model = make_model(tokenizer)
    optimizers = make_optimizers(model, args.lr)
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    checkpoint = args.work / f"{args.recipe}.pt"
    first, seconds = 0, 0.0
    names = ("seed", "lr", "tokens_per_step", "float32")
    options = {name: getattr(args, name) for name in names}
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        check_same(saved.get("options", {}), options, checkpoint)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"]):
            optimizer.load_state_dict(state)
        first, seconds = saved["step"], saved["seconds"]

    warmup = max(min(100, args.steps // 10), 1)
    progress = tqdm(range(first, args.steps), initial=first, total=args.steps,
                    desc=args.recipe, mininterval=10)  # fmt: skip
    for step in progress:
        begun = time.monotonic()
        torch.manual_seed(args.seed + 1 + step)  # a resumed run sees the same batches
        # The rate is constant until the last quarter, so that a resumed run may ask
        # for other `--steps`; that quarter falls to 0 and sees the full context.
        left = (args.steps - step) / (args.steps / 4)
        length = CONTEXT // 2 if left > 1 else CONTEXT
        number = args.tokens_per_step // length
        from_others = int((torch.rand(number) < OTHER_PACKAGES).sum())
        batch = torch.cat(
            [
                draw_windows(text, share, length)
                for text, share in ((tokens, number - from_others), (others, from_others))
                if share
            ]
        )
        ids, targets = batch[:, :-1], batch[:, 1:]

        rate = min((step + 1) / warmup, left, 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * rate

        with torch.autocast("cpu", torch.bfloat16, enabled=not args.float32):
            if args.recipe == "exits":
                early, full = forward(model, ids, (exit_of(step), LAYERS))
                full_loss = cross_entropy(model, full, targets)
                early_loss = cross_entropy(model, early, targets)
                loss = (1 - EXIT_WEIGHT) * full_loss + EXIT_WEIGHT * early_loss
            else:
                (full,) = forward(model, ids, (LAYERS,))
                loss = full_loss = cross_entropy(model, full, targets)
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        seconds += time.monotonic() - begun
        progress.set_postfix(loss=f"{full_loss.item():.3f}")
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == args.steps:
            state = {"model": model.state_dict(),
                     "optimizers": [o.state_dict() for o in optimizers],
                     "step": step + 1, "seconds": seconds,
                     "options": options}  # fmt: skip
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").rename(checkpoint)
    return model, seconds


@torch.inference_mode()
def evaluate(model: LlamaForCausalLM, tokens: torch.Tensor) -> tuple[int, list[float]]:
    """Mean loss in nats at each exit, over disjoint windows of the full context.

    Returns:
        The number of tokens scored, and one loss per depth 1 to `LAYERS`.
    """
    exits = tuple(range(1, LAYERS + 1))
    losses, count = torch.zeros(LAYERS, dtype=torch.float64), 0
    for start in tqdm(range(0, len(tokens) - CONTEXT - 1, CONTEXT), desc="evaluate"):
        window = tokens[start : start + CONTEXT + 1].long()[None]
        for index, state in enumerate(forward(model, window[:, :-1], exits)):
            losses[index] += (
                CONTEXT * cross_entropy(model, state, window[:, 1:]).double()
            )
        count += CONTEXT
    return count, (losses / count).tolist()


def main() -> None:
    args = parse_args()
    args.out = args.out or args.work / args.recipe
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer_dir, tokens_file = args.work / "tokenizer", args.work / "corpus.pt"
    held_out = read(args.archive, held_out=True)
    if not tokens_file.exists():
        texts = list(read(args.archive, held_out=False).values())
        others = list(read_packages(without=[*texts, *held_out.values()]).values())
        tokenizer = train_tokenizer(texts)
        tokenizer.save_pretrained(tokenizer_dir)
        streams = {"tokens": texts, "others": others}
        corpus = {name: tokenize(tokenizer, texts) for name, texts in streams.items()}
        torch.save({"archive": args.archive.name} | corpus, tokens_file)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    corpus = torch.load(tokens_file, weights_only=True)
    check_same(corpus, {"archive": args.archive.name}, tokens_file)
    tokens, others = corpus["tokens"], corpus["others"]

    model, seconds = train(args, tokenizer, tokens, others)
    model = model.bfloat16()
    count, losses = evaluate(
        model.float(), tokenize(tokenizer, list(held_out.values()))
    )
    model.bfloat16().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    report = {
        "recipe": args.recipe,
        "steps": args.steps,
        "tokens_per_step": args.tokens_per_step,
        "training_tokens_available": {"vllm": len(tokens), "other packages": len(others)},
        "packages": {name: version(name) for name in PACKAGES},
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_seconds": round(seconds),
        "held_out_files": len(held_out),
        "held_out_tokens": count,
        "held_out_loss_by_depth": [round(loss, 4) for loss in losses],
    }
    (args.out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
