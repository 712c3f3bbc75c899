"""The model card of an exported head: its shape, training data and acceptance."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.drafters.kinds.eagle3 import Eagle3Config
from jaxspec.lab.training.config import TrainConfig, TrainingRun
from jaxspec.lab.training.evaluate import length_text

_FORMATS = {
    "speculators": "speculators', which vLLM reads; includes the target's embedding and output rows",
    "shared": "speculators', without `embed_tokens.weight` and `lm_head.weight`: jaxspec takes the target's",
    "safeailab": "SafeAILab/EAGLE's",
}


def head_card(
    run: TrainingRun,
    head: Eagle3Config,
    *,
    form: str,
    target_name: str,
    stages: dict[str, dict[str, Any]],
    acceptance: dict[str, dict[str, Any]],
    sizes: TrainConfig,
) -> str:
    """The model card, in Markdown.

    Args:
      run: the run's configuration.
      head: the head's shape.
      form: one of `jaxspec.lab.training.export.FORMATS`.
      target_name: name of the target.
      stages: results of the finished stages, by name.
      acceptance: results of the stage "evaluate"; empty if it was not run.
      sizes: sizes of the training, as `jaxspec.lab.training.sizes.resolve_sizes` returns them.
    """
    layers, source = head.layers, run.target
    loaded = source.source + (f", `{source.file}`" if source.file else "")
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    named = ", ".join(f"`{name}`" for name in flags if getattr(head, name)) or "no flags"
    facts = {
        "target": target_name if target_name == source.source else f"{target_name} (trained on {loaded})",
        "licence": run.export.license or "not stated",
        "format": f"{_FORMATS[form]}; {named}",
        "reads": f"the target's hidden states before layers {', '.join(map(str, head.capture))}",
        "size": f"{layers.num_hidden_layers} layer(s), hidden {layers.hidden_size}, "
        f"{layers.num_attention_heads} query and {layers.num_key_value_heads} key/value heads of "
        f"{layers.head_dim}, feed-forward {layers.intermediate_size}, rotary base {layers.rope.theta:g}",
        "draft vocabulary": f"{head.draft_vocab_size} of {layers.vocab_size} tokens: "
        f"{100 * stages['vocabulary']['coverage']:.1f} % of the answers'",
    }
    parts = [
        f"# An EAGLE-3 head for {Path(target_name).name}",
        _table(("", ""), list(facts.items())),
        "## Acceptance",
        _acceptance(run, acceptance),
        "## Data",
        _data(run, stages),
        "## Training",
        _training(run, stages, sizes),
    ]
    return "\n\n".join(parts) + "\n"


def _acceptance(run: TrainingRun, acceptance: dict[str, dict[str, Any]]) -> str:
    if not acceptance:
        return "Not measured."
    config = run.evaluate
    baseline = "the initial head" if run.head.initial else "prompt lookup"
    rows = []
    for name, result in acceptance.items():
        if name.startswith("before, "):
            continue
        before = acceptance.get(f"before, {name}")
        prompts, _, temperature = name.rpartition(" temperature ")
        rows.append(
            (
                f"{Path(prompts).name}, {result['prompts']}",
                temperature,
                "" if before is None else length_text(before),
                length_text(result),
                " ".join(f"{rate:.3f}" for rate in result["acceptance_per_position"]),
            )
        )
    head = ("prompts", "temperature", baseline, "this head", "accepted up to position 0, 1, …")
    return (
        "Tokens per step, including the target's own, with 95 % intervals over prompts; "
        f"K = {config.num_speculative_tokens}, at most {config.max_new_tokens} new tokens, measured with "
        "jaxspec's engine. Held-out prompts are a part of the data that was not trained on.\n\n"
        + _table(head, rows)
    )


def _data(run: TrainingRun, stages: dict[str, dict[str, Any]]) -> str:
    prompts, answers = stages["prompts"], stages["responses"]
    sources = run.export.data or [f"{Path(name).name}: licence not stated" for name in run.prompts.files]
    lines = [
        *sources,
        f"{prompts['from_files']} prompts from files and {prompts['synthetic']} sampled from the target; "
        f"left out: {prompts['repeated']} repeated, {prompts['held_out']} that shared 13 words in a row with "
        f"a benchmark's prompts, {prompts['too_long']} of more than {run.prompts.max_tokens} tokens. "
        f"{prompts['set_aside']} were held out, {prompts['prompts']} remained.",
        f"{answers['answers']} answers, {answers['tokens']} tokens: {prompts['answered']} came with their "
        f"prompts, the others are the target's own, at temperatures "
        f"{_numbers(run.responses.temperatures)} in turn"
        + (
            f" and once more at {_numbers(run.responses.extra_temperatures)}"
            if run.responses.extra_temperatures
            else ""
        )
        + f", at most {run.responses.max_new_tokens} tokens.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _training(run: TrainingRun, stages: dict[str, dict[str, Any]], sizes: TrainConfig) -> str:
    train = stages["train"]
    start = f"the head `{Path(run.head.initial).name}`" if run.head.initial else "random weights"
    text = (
        f"From {start}: {train['updates']} updates of {sizes.batch_size} rows of {sizes.row_length} tokens, "
        f"{train['tokens']:,} tokens; {sizes.optimizer}, learning rate {sizes.learning_rate:g}, "
        f"objective {sizes.objective.replace('_', ' ')}, {sizes.num_unroll_steps} draft steps, on "
        f"{train['devices']} x {train['device']} at {train['tokens_per_second']:,.0f} tokens/s."
    )
    if weight := run.average.initial:
        text += (
            f" The parameters are an average: {1 - weight:g} of the trained ones and {weight:g} of the "
            "initial ones."
        )
    return f"{text}\n\n```sh\n{run.export.command}\n```" if run.export.command else text


def _numbers(values: tuple) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
