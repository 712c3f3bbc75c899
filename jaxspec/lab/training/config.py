"""Training configurations: a TOML file as frozen dataclasses."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxspec.config import (
    ConfigError,
    DrafterConfig,
    EngineConfig,
    SourceConfig,
    build_section,
    named_drafter,
    named_target,
)
from jaxspec.config.drafter import MAX_DRAFTS
from jaxspec.config.errors import all_of, at_least, positive, use_plain_values
from jaxspec.config.toml import read_toml
from jaxspec.sampling import SamplingParams
from jaxspec.spelling import known_names

_MAX_SEED = 2**32 - 1
"""The largest seed of a stage; a seed for each of its answers is made from it, of 64 bits."""


@dataclass(frozen=True)
class PromptsConfig:
    """The prompts: from files, or sampled from the target.

    Attributes:
      files: JSONL files; see `jaxspec.lab.training.prompt_files.read_rows` for what a row may hold.
      held_out: JSONL files of benchmark prompts. A prompt is dropped if a turn of its user equals one of
        theirs, or shares 13 words in a row with one.
      held_out_share: share of the prompts that is held out: at least 8, at most 128 and at most a quarter of
        them. Acceptance before and after training is measured on these. Their text decides which ones they
        are, so they are the same in every run.
      max_tokens: longer prompts are dropped; the chat template counts.
      synthetic: number of user turns to sample from the target itself.
      synthetic_temperature: their sampling temperature.
      synthetic_max_tokens: longer ones are dropped.
      seed: seed of the order of the prompts and of sampling them.
    """

    files: tuple = ()
    held_out: tuple = ()
    held_out_share: float = 0.0
    max_tokens: int = 2048
    synthetic: int = 0
    synthetic_temperature: float = 1.0
    synthetic_max_tokens: int = 160
    seed: int = 0

    def __post_init__(self) -> None:
        use_plain_values(self)
        all_of("prompts.files", self.files, str, "names of files")
        all_of("prompts.held_out", self.held_out, str, "names of files")
        at_least("prompts.max_tokens", self.max_tokens, 1)
        at_least("prompts.synthetic", self.synthetic, 0)
        at_least("prompts.synthetic_max_tokens", self.synthetic_max_tokens, 1)
        at_least("prompts.seed", self.seed, 0, _MAX_SEED)
        _check_temperatures("prompts.synthetic_temperature", [self.synthetic_temperature])
        if not 0 <= self.held_out_share < 1:
            raise ConfigError(f"prompts.held_out_share must be from 0 to below 1, got {self.held_out_share}")


@dataclass(frozen=True)
class ResponsesConfig:
    """How the target answers the prompts that come without an answer.

    Attributes:
      temperatures: used in turn, one prompt after another.
      extra_temperatures: every prompt gets a further answer at each of these.
      max_new_tokens: the most tokens of an answer.
      seed: seed of the sampling.
    """

    temperatures: tuple = (0.0, 1.0)
    extra_temperatures: tuple = ()
    max_new_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        use_plain_values(self)
        if not self.temperatures:
            raise ConfigError("responses.temperatures must name at least one temperature")
        _check_temperatures("responses.temperatures", self.temperatures)
        _check_temperatures("responses.extra_temperatures", self.extra_temperatures)
        at_least("responses.max_new_tokens", self.max_new_tokens, 1)
        at_least("responses.seed", self.seed, 0, _MAX_SEED)


@dataclass(frozen=True)
class VocabularyConfig:
    """The draft vocabulary: the `size` most frequent tokens of the answers.

    Attributes:
      size: 0 takes the size of the initial head, else `jaxspec.lab.training.sizes.draft_vocabulary_size`.
    """

    size: int = 0


@dataclass(frozen=True)
class HeadConfig:
    """The shape of the head; the defaults are the sizes of the target, or of the initial head.

    Attributes:
      initial: an EAGLE-3 head to start from, with any draft vocabulary: a folder or a Hugging Face Hub id.
        Empty starts from random weights.
      num_layers: number of decoder layers.
      intermediate_size: F, width of the feed-forward networks.
      capture: indices of the target's hidden states that the head reads; i is the input of layer i. Empty
        takes (2, L // 2, L - 3) for L layers.
      rope_theta: base of the rotary frequencies; SafeAILab's code assumes 10000.
      norm_before_residual, fc_norm, norm_output: see `Eagle3Config`. Only speculators' format has these.
    """

    initial: str = ""
    num_layers: int = 1
    intermediate_size: int | None = None
    capture: tuple = ()
    rope_theta: float = 10000.0
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        use_plain_values(self)
        if self.intermediate_size is not None:
            at_least("head.intermediate_size", self.intermediate_size, 1)
        all_of("head.capture", self.capture, int, "indices of layers")
        positive("head.rope_theta", self.rope_theta)


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation.

    Attributes:
      steps: number of updates; 0 derives it from `epochs`.
      epochs: if `steps` is 0, how often every row is used; there are at least 300 updates, 20 to adapt a head
        on a CPU. Warm-up, intervals and validation rows are reduced if they are too many for the number of
        updates.
      batch_size: packed rows per update, over all devices; 0 derives it from `batch_tokens`.
      batch_tokens: tokens per update if `batch_size` is 0; fewer if the device's memory is too small.
      row_length: tokens per row. Longer conversations are cut, and left out if nothing of the answer
        remains. 0 takes the length of the longest conversation.
      optimizer: "adamw" for everything, or "muon" for the matrices and AdamW for the rest.
      learning_rate: the rate after warm-up; a cosine reduces it to a hundredth.
      warmup_steps: updates over which the rate rises from 0.
      clip_norm: the largest norm of a gradient.
      weight_decay, beta1, beta2: parameters of AdamW.
      objective: "cross_entropy" with the target's distribution on the draft vocabulary; or
        "total_variation" between both distributions, which gradually replaces the cross-entropy during the
        first half of the updates. See `jaxspec.lab.training.loss.position_loss`.
      num_unroll_steps: draft steps of the training-time test, at most 64.
      step_decay: the weight of draft step k is step_decay ** k.
      validation_rows: packed rows not trained on.
      validate_every, checkpoint_every, log_every: intervals, in updates.
      seed: seed of the initial weights, the packing and the order of the rows.
    """

    steps: int = 0
    epochs: float = 4.0
    batch_size: int = 0
    batch_tokens: int = 16384
    row_length: int = 0
    optimizer: str = "adamw"
    learning_rate: float = 5e-4
    warmup_steps: int = 100
    clip_norm: float = 0.5
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    objective: str = "cross_entropy"
    num_unroll_steps: int = 7
    step_decay: float = 0.8
    validation_rows: int = 64
    validate_every: int = 250
    checkpoint_every: int = 500
    log_every: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        use_plain_values(self)
        for name in ("steps", "batch_size", "row_length", "warmup_steps", "validation_rows"):
            at_least(f"train.{name}", getattr(self, name), 0)
        at_least("train.seed", self.seed, 0, _MAX_SEED)
        at_least("train.num_unroll_steps", self.num_unroll_steps, 1, MAX_DRAFTS)
        for name in ("log_every", "validate_every", "checkpoint_every", "batch_tokens"):
            at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("epochs", "learning_rate", "clip_norm"):
            positive(f"train.{name}", getattr(self, name))
        for name, end in (("beta1", 1), ("beta2", 1), ("weight_decay", math.inf), ("step_decay", math.inf)):
            if not 0 <= getattr(self, name) < end:
                raise ConfigError(f"train.{name} must be from 0 to below {end}, got {getattr(self, name)}")
        if self.optimizer not in ("adamw", "muon"):
            raise ConfigError(f"train.optimizer must be 'adamw' or 'muon', not {self.optimizer!r}")
        if self.objective not in ("cross_entropy", "total_variation"):
            raise ConfigError(
                f"train.objective must be 'cross_entropy' or 'total_variation', not {self.objective!r}"
            )
        if self.steps and self.warmup_steps >= self.steps:
            raise ConfigError(
                f"train.warmup_steps must be below train.steps {self.steps}, got {self.warmup_steps}"
            )
        if 0 < self.row_length < self.num_unroll_steps + 2:
            raise ConfigError(
                f"train.row_length {self.row_length} is too short for {self.num_unroll_steps} unroll steps"
            )


@dataclass(frozen=True)
class AverageConfig:
    """Averaging the trained head with the one that it started from.

    The average drafts almost as well for the new prompts as the trained head, and for the old ones as the
    initial head or better (Wortsman et al. 2022, "Robust fine-tuning of zero-shot models").

    Attributes:
      initial: the weight of the initial head's parameters in the head that is evaluated and exported.
    """

    initial: float = 0.0

    def __post_init__(self) -> None:
        use_plain_values(self)
        if not 0 <= self.initial < 1:
            raise ConfigError(f"average.initial must be from 0 to below 1, got {self.initial}")


@dataclass(frozen=True)
class EvaluateConfig:
    """How the trained head is evaluated, with the engine.

    Attributes:
      files: JSONL files of prompts, as in `PromptsConfig`.
      temperatures: every file is answered at each of these.
      seeds: at a temperature above 0, every file is answered with each of these seeds.
      num_speculative_tokens: K.
      max_new_tokens: the most tokens of an answer.
    """

    files: tuple = ()
    temperatures: tuple = (0.0, 1.0)
    seeds: tuple = (0,)
    num_speculative_tokens: int = 4
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        use_plain_values(self)
        all_of("evaluate.files", self.files, str, "names of files")
        _check_temperatures("evaluate.temperatures", self.temperatures)
        if not self.seeds:
            raise ConfigError("evaluate.seeds must name at least one seed")
        for seed in self.seeds:
            at_least("evaluate.seeds", seed, 0, 2**64 - 1)
        at_least("evaluate.num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFTS)
        at_least("evaluate.max_new_tokens", self.max_new_tokens, 1)


@dataclass(frozen=True)
class ExportConfig:
    """Metadata of the exported head.

    Attributes:
      target_name: name of the target in the config and on the card. speculators and vLLM open the target by
        it: a Hugging Face Hub id or a folder of safetensors. Empty takes the name by which it was loaded,
        which these two cannot open if it is a GGUF.
      license: the head's licence.
      data: sources of the prompts with their licences, one per line.
      command: the command that trains it.
    """

    target_name: str = ""
    license: str = ""
    data: tuple = ()
    command: str = ""

    def __post_init__(self) -> None:
        use_plain_values(self)
        all_of("export.data", self.data, str, "texts")


@dataclass(frozen=True)
class TrainingRun:
    """The contents of one TOML file.

    Attributes:
      target: the target's checkpoint.
      engine: sizes of the engine that generates and evaluates; they affect speed, not results.
      prompts, responses, vocabulary, head, train, average, evaluate, export: see their classes.
    """

    target: SourceConfig
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)
    vocabulary: VocabularyConfig = field(default_factory=VocabularyConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    average: AverageConfig = field(default_factory=AverageConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", named_target(self.target))
        if self.head.initial:
            source = named_drafter(DrafterConfig("eagle3", source=self.head.initial)).source
            object.__setattr__(self, "head", dataclasses.replace(self.head, initial=source or ""))
        if self.average.initial and not self.head.initial:
            raise ConfigError("average.initial needs head.initial, the head to average with")
        # A run takes the positions that its prompts need, reads plain weights, and splits rows, not weights.
        if self.engine.max_model_len is not None:
            raise ConfigError("engine.max_model_len has no effect on a training run; leave it out")
        if self.engine.cpu_activations not in (None, "float32"):
            raise ConfigError("engine.cpu_activations: a training run rounds none; leave it out")
        if self.engine.packed is not None:
            raise ConfigError("engine.packed: a training run packs no weights; leave it out")
        if self.engine.output_dtype is not None:
            raise ConfigError("engine.output_dtype: a training run rounds no weights; leave it out")
        if self.engine.tensor_parallel != 1:
            raise ConfigError("engine.tensor_parallel: a training run splits no weights; leave it out")

    def settings(self, *sections: str) -> dict[str, Any]:
        """The named sections as JSON values."""
        return {name: _plain(dataclasses.asdict(getattr(self, name))) for name in sections}


def load_training_run(path: str | Path) -> TrainingRun:
    """Reads a training configuration.

    Raises:
      ConfigError: the file does not exist, is not TOML, or has an unknown key or a bad value.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file or folder")
    document = read_toml(path)
    known = {f.name: f.type for f in dataclasses.fields(TrainingRun)}
    unknown = sorted(set(document) - set(known))
    if unknown:
        raise ConfigError(f"{path}: unknown section [{unknown[0]}]; {known_names(unknown[0], known)}")
    if "target" not in document:
        raise ConfigError(f"{path}: the section [target] is missing")
    sections = {}
    for name, section in document.items():
        if not isinstance(section, Mapping):
            raise ConfigError(f"{path}: {name!r} must be a section, [{name}]")
        cls = known[name]
        assert isinstance(cls, type)
        if name == "train":
            _check_alternatives(section)
        frozen = {key: tuple(v) if isinstance(v, list) else v for key, v in section.items()}
        sections[name] = build_section(cls, name, frozen)
    return TrainingRun(**sections)


def _check_alternatives(train: Mapping[str, Any]) -> None:
    """Checks that no given key of [train] would take the effect from another."""
    for first, second in (("steps", "epochs"), ("batch_size", "batch_tokens")):
        if train.get(first) and second in train:
            raise ConfigError(f"train.{first} and train.{second}: give one of them")


def _check_temperatures(name: str, values: Sequence[Any]) -> None:
    try:
        for value in values:
            SamplingParams(temperature=value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    return list(value) if isinstance(value, tuple) else value
