# SPDX-License-Identifier: Apache-2.0
"""Trains the reference model: a small Llama whose intermediate layers can exit.

    python examples/reference_model/train.py --archive build/downloads/vllm-0.32.0.tar.gz

The recipe is LayerSkip's (Elhoushi et al. 2024, arXiv:2404.16710): layer dropout
that grows with depth, and a rotating early-exit loss through the shared final norm
and head. `--recipe plain` trains the same model without either. An interrupted run
goes on from its last checkpoint.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import read
from tokenizers import ByteLevelBPETokenizer
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"
LAYERS = 12
VOCABULARY = 4096
CONTEXT = 1024
LAYER_DROPOUT = 0.1
EXIT_SCALE = 1.0
CHECKPOINT_EVERY = 100


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--archive", type=Path, required=True)
    parser.add_argument("--out", type=Path,
                        help="default: a folder named as the recipe, in --work")  # fmt: skip
    parser.add_argument("--recipe", choices=["layerskip", "plain"], default="layerskip")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("build/reference_model"),
                        help="checkpoints and the tokenised corpus")  # fmt: skip
    return parser.parse_args()


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
    model: LlamaForCausalLM,
    ids: torch.Tensor,
    exits: tuple[int, ...],
    dropout: float = 0.0,
) -> list[torch.Tensor]:
    """Runs the layers and keeps the states at the asked exits.

    Args:
        model: the model.
        ids: int64 `[sequences, positions]`.
        exits: numbers of layers run, ascending, 1 to `LAYERS`.
        dropout: probability that the batch skips the last layer; it falls to 0 at
            the first layer (LayerSkip, equation 1).

    Returns:
        Per exit the normalised hidden state, float32 `[sequences, positions, hidden]`.
    """
    hidden = model.model.embed_tokens(ids)
    position_ids = torch.arange(ids.shape[1])[None]
    rotary = model.model.rotary_emb(hidden, position_ids)
    states = []
    for index, layer in enumerate(model.model.layers):
        rate = dropout * (math.exp(index * math.log(2) / (LAYERS - 1)) - 1)
        if torch.rand(()) >= rate:
            hidden = layer(hidden, position_embeddings=rotary)
        if index + 1 in exits:
            states.append(model.model.norm(hidden))
    return states


def cross_entropy(model: LlamaForCausalLM, state: torch.Tensor, targets: torch.Tensor):
    logits = model.lm_head(state.flatten(0, 1))
    return F.cross_entropy(logits, targets.flatten())


def exit_weights(depth: int) -> tuple[float, float]:
    """Loss weights of (the exit after `depth` layers, the full model), summing to 1
    (LayerSkip, equations 4 to 6, with one exit a step)."""
    early = EXIT_SCALE * (depth - 1) * depth / 2
    full = LAYERS - 1 + EXIT_SCALE * (LAYERS - 2) * (LAYERS - 1) / 2
    return early / (early + full), full / (early + full)


def train(args: argparse.Namespace, tokenizer, tokens: torch.Tensor):
    torch.manual_seed(args.seed)
    model = make_model(tokenizer)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
        fused=True,
    )  # fmt: skip
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    checkpoint = args.work / f"{args.recipe}.pt"
    first, seconds = 0, 0.0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first, seconds = saved["step"], saved["seconds"]

    warmup = min(100, args.steps // 10)
    progress = tqdm(range(first, args.steps), initial=first, total=args.steps,
                    desc=args.recipe, mininterval=10)  # fmt: skip
    for step in progress:
        begun = time.monotonic()
        torch.manual_seed(args.seed + 1 + step)  # a resumed run sees the same batches
        # The rate is constant until the last quarter, so that a resumed run may ask
        # for other `--steps`; that quarter falls to 0 and sees the full context.
        left = (args.steps - step) / (args.steps / 4)
        length = CONTEXT // 2 if left > 1 else CONTEXT
        starts = torch.randint(
            len(tokens) - length - 1, (args.tokens_per_step // length,)
        )
        batch = torch.stack(
            [tokens[s : s + length + 1] for s in starts.tolist()]
        ).long()
        ids, targets = batch[:, :-1], batch[:, 1:]

        rate = min((step + 1) / warmup, left, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate

        if args.recipe == "layerskip":
            depth = step % (LAYERS - 1) + 1
            early, full = forward(model, ids, (depth, LAYERS), LAYER_DROPOUT)
            early_weight, full_weight = exit_weights(depth)
            full_loss = cross_entropy(model, full, targets)
            loss = full_weight * full_loss
            if early_weight:
                loss = loss + early_weight * cross_entropy(model, early, targets)
        else:
            (full,) = forward(model, ids, (LAYERS,))
            loss = full_loss = cross_entropy(model, full, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seconds += time.monotonic() - begun
        progress.set_postfix(loss=f"{full_loss.item():.3f}")
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == args.steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                     "step": step + 1, "seconds": seconds}  # fmt: skip
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
    tokenizer_dir, tokens_file = args.work / "tokenizer", args.work / "tokens.pt"
    if not tokens_file.exists():
        texts = list(read(args.archive, held_out=False).values())
        tokenizer = train_tokenizer(texts)
        tokenizer.save_pretrained(tokenizer_dir)
        torch.save(tokenize(tokenizer, texts), tokens_file)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    tokens = torch.load(tokens_file, weights_only=True)

    model, seconds = train(args, tokenizer, tokens)
    model = model.bfloat16()
    held_out = read(args.archive, held_out=True)
    count, losses = evaluate(
        model.float(), tokenize(tokenizer, list(held_out.values()))
    )
    model.bfloat16().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    report = {
        "recipe": args.recipe,
        "steps": args.steps,
        "tokens_per_step": args.tokens_per_step,
        "training_tokens_available": len(tokens),
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
