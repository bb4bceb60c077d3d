# SPDX-License-Identifier: Apache-2.0
"""A small student learns from a served teacher, with TRL as it is (on-policy distillation).

    .venv/bin/pip install --no-deps --require-hashes -r requirements/trl.lock
    OMP_NUM_THREADS=1 .venv/bin/vllm serve examples/reference_model/model --enforce-eager \\
        --max-logprobs 100 --prompt-logprobs-at-temperature \\
        --kv-cache-memory-bytes 268435456  # one terminal
    OMP_NUM_THREADS=1 .venv/bin/python examples/distill_trl.py --output build/student

Threads of the two would wait for each other on a CPU, hence one each.

The student is every third layer of the teacher. It continues the first lines of functions;
the teacher says of each token that it wrote what the 100 most probable ones were. The loss
is the divergence of the student from the teacher over these 100 and all others together.
"""

import argparse
import re
import warnings
from pathlib import Path

from common import quiet

MODEL = Path(__file__).parent / "reference_model" / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--teacher", default="http://localhost:8000", metavar="URL")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=16, help="completions a step")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    args = parser.parse_args()
    quiet.hush()
    warnings.filterwarnings("ignore", "TRL currently supports|.*trl.experimental")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental.server_distillation import (
        ServerDistillationConfig,
        ServerDistillationTrainer,
    )

    student = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    student.model.layers = student.model.layers[::3]
    student.config.num_hidden_layers = len(student.model.layers)
    for number, layer in enumerate(student.model.layers):
        layer.self_attn.layer_idx = number  # its place in the cache
    prompts = Dataset.from_dict({"prompt": functions()}).shuffle(seed=0)
    split = prompts.train_test_split(test_size=32, shuffle=False)
    trainer = ServerDistillationTrainer(
        student,
        args=ServerDistillationConfig(
            output_dir=str(args.output),
            teacher_model_server_url=args.teacher,
            loss_top_k=100,
            beta=0.0,  # KL(teacher || student)
            temperature=args.temperature,
            max_completion_length=64,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            learning_rate=1e-3,
            warmup_steps=10,
            per_device_eval_batch_size=args.batch,
            logging_steps=min(5, args.steps),
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=split["train"],
        eval_dataset=split["test"],
        processing_class=AutoTokenizer.from_pretrained(MODEL, padding_side="left"),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    history = trainer.state.log_history
    seconds = history[-2]["train_runtime"]
    print(f"{args.output}: {args.steps} steps in {seconds:.0f} s; of functions that it has "
          f"not seen, {before:.3f} nats a token before and {after:.3f} after")  # fmt: skip
    if args.plot:
        plot([row for row in history if "loss" in row], args.plot)


def functions() -> list[str]:
    """First lines of functions and classes of the installed vLLM."""
    import vllm

    texts = [path.read_text() for path in sorted(Path(vllm.__path__[0]).rglob("*.py"))]
    return sorted(set(re.findall(r"^(?:def|class) .{10,80}:\n", "".join(texts), re.M)))


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], marker=".")
    axes.set(xlabel="step", ylabel="KL(teacher || student), nats a token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    main()
