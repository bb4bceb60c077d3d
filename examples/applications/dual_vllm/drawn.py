# SPDX-License-Identifier: Apache-2.0
"""Drawn tokens in a journal: settings, models and prompts first, then each token with
its diagnostics, as it is drawn."""

from collections import deque
from collections.abc import Iterable

from common import Journal, Model

from dual_vllm.coordinator import Diagnostics, GenerationOutput, Sample, Step

# Of no influence on what is drawn, so that a run may go on with others; of the models
# the header says what the servers do.
FREE_SETTINGS = {"url_a", "url_b", "model_a", "model_b"}
FREE_SETTINGS |= {"batch_size", "patience", "timeout", "api_key"}


def resume(
    journal: Journal,
    settings: dict,
    models: Iterable[Model],
    samples: Iterable[Sample],
) -> deque[Sample]:
    """Gives the samples the tokens that were drawn already.

    Returns:
        Those that are not finished.

    Raises:
        JournalError: the journal holds a run with other settings, models or prompts,
            or something else. It is left as it is.
    """
    outputs = {sample.output.sample: sample for sample in samples}
    header = {
        "settings": {k: v for k, v in settings.items() if k not in FREE_SETTINGS},
        "models": [[model.name, model.root] for model in models],
        "prompts": [s.output.prompt_token_ids for s in outputs.values()],
    }

    def read(line: dict) -> None:
        _append(outputs[line["sample"]].output, line)

    journal.begin(header, read, inside=["settings"])
    return deque(s for s in outputs.values() if s.output.finish_reason is None)


def append(journal: Journal, steps: list[Step]) -> None:
    """Writes drawn tokens; when this returns they survive the process."""
    lines = (
        {
            "sample": step.sample,
            "position": step.position,
            "token_id": step.token_id,
            "finish_reason": step.finish_reason,
            **step.diagnostics._asdict(),
        }
        for step in steps
    )
    journal.append(*lines)


def _append(output: GenerationOutput, line: dict) -> None:
    if line["position"] != len(output.token_ids):
        raise ValueError(f"a token is missing before {line['position']}")
    output.token_ids.append(line["token_id"])
    values = {name: line[name] for name in Diagnostics._fields}
    output.diagnostics.append(Diagnostics(**values))
    output.finish_reason = line["finish_reason"]
