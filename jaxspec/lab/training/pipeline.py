"""The stages of a training run; each can be run, interrupted and resumed separately."""

import dataclasses
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.config import ConfigError, DrafterConfig, ModelConfig
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.formats import open_drafter
from jaxspec.drafters.kinds.eagle3 import Eagle3, Eagle3Config
from jaxspec.drafters.kinds.none import NoDrafter
from jaxspec.drafters.loading import Build, load_drafter
from jaxspec.engine import Engine
from jaxspec.files import Checkpoint, Tokenizer, open_checkpoint
from jaxspec.files.gguf.architecture import model_classes
from jaxspec.jax_settings import Device, own_settings, platform, training_devices
from jaxspec.lab.training.card import head_card
from jaxspec.lab.training.config import TrainingRun
from jaxspec.lab.training.draft_vocabulary import (
    VOCABULARY,
    choose_vocabulary,
    coverage,
    draft_order,
    token_counts,
)
from jaxspec.lab.training.evaluate import ACCEPTANCE, comparison, measure
from jaxspec.lab.training.export import embedding_rows, export_head, why_not_safeailab
from jaxspec.lab.training.head import config_from, head_config, is_trained, new_head, start_from
from jaxspec.lab.training.packing import Conversations, join_answers
from jaxspec.lab.training.prompt_files import encode_fitting
from jaxspec.lab.training.prompts import ANSWERS, HELD_OUT, PROMPTS, check_tokenizer, make_prompts
from jaxspec.lab.training.responses import make_responses
from jaxspec.lab.training.sizes import (
    FEWEST_STEPS,
    FEWEST_STEPS_TO_ADAPT_ON_A_CPU,
    device_memory,
    draft_vocabulary_size,
    fitting_slots,
    read_sizes,
    resolve_sizes,
    save_sizes,
)
from jaxspec.lab.training.stage_folder import STAGES, StageFolder, check_output, set_aside
from jaxspec.lab.training.token_rows import TokenRows, read_shards
from jaxspec.lab.training.train import restore_head, train
from jaxspec.lab.training.trainer import Trainer, TrainState
from jaxspec.models.decoder import Decoder
from jaxspec.models.target import load_target, target_config
from jaxspec.sampling import SamplingMode

# The sections of the configuration on which the content of each stage's folder depends.
_STAGE_SECTIONS = {
    "prompts": ("target", "prompts"),
    "responses": ("target", "prompts", "responses"),
    "vocabulary": ("target", "prompts", "responses", "vocabulary", "head"),
    "train": ("target", "prompts", "responses", "vocabulary", "head", "train"),
    "evaluate": ("target", "prompts", "responses", "vocabulary", "head", "train", "average", "evaluate"),
    "export": ("target", "prompts", "responses", "vocabulary", "head", "train", "average", "export"),
}

_MIXED_TOKENS_PER_SLOT = 16
"""Prompt tokens that a dispatch reads per slot, on a GPU."""


class Pipeline:
    """One training run in one output folder."""

    def __init__(self, run: TrainingRun, output: Path, *, data: Path, device: Device | None = None):
        """Opens the target and checks the configuration.

        Args:
          run: the configuration.
          output: the run's folder.
          data: the folder to which file names in the configuration are relative.
          device: as for `load`, but a platform stands for all of its devices in this process. The head is
            trained on all of them; answers come from the first. None takes `jax.default_device` if that is
            one device, else all of the default platform.

        Raises:
          ConfigError: the output folder holds something else, or the head cannot be built.
          CheckpointError: the target cannot be opened.
        """
        self._devices = training_devices(device)
        with own_settings(self._devices[0]):
            self._open(run, output, data)

    def _open(self, run: TrainingRun, output: Path, data: Path) -> None:
        check_output(output)
        self.run, self.output, self.data = run, output, data
        source = run.target
        self.checkpoint: Checkpoint = open_checkpoint(source.source, file=source.file, sha256=source.sha256)
        shape = target_config(self.checkpoint)
        initial = self._initial_config(shape) if run.head.initial else None
        size = run.vocabulary.size
        if not size:
            size = draft_vocabulary_size(shape) if initial is None else initial.draft_vocab_size
        if not 1 <= size <= shape.vocab_size:
            raise ConfigError(
                f"vocabulary.size must be between 1 and the target's vocabulary of {shape.vocab_size}, "
                f"got {size}"
            )
        if initial is None:
            self.head_config = head_config(run.head, shape, size)
        else:
            self.head_config = config_from(initial, run.head, shape, size)
        self.tokenizer: Tokenizer = check_tokenizer(self.checkpoint.tokenizer, source.source)

    def run_stage(self, name: str) -> dict:
        """Runs a stage, or resumes it, and returns its results. A finished stage is not run again.

        Raises:
          ConfigError: an earlier stage is not finished, or the folder belongs to another run.
        """
        folder = self._folder(name)
        if not folder.is_done:
            with own_settings(self._devices[0]):
                getattr(self, f"_{name}")(folder)
        return folder.results

    @cached_property
    def target(self) -> Decoder:
        limit, engine = target_config(self.checkpoint).max_position_embeddings, self.run.engine
        engine.check_fits(backend=platform(), model_limit=limit)
        return load_target(self.checkpoint, dtype=jnp.dtype(engine.dtype_on(platform())))

    def _folder(self, stage: str) -> StageFolder:
        return StageFolder(self.output, stage, self._settings(stage))

    def _settings(self, stage: str) -> dict[str, Any]:
        """The settings on which a stage's content depends."""
        settings = self.run.settings(*_STAGE_SECTIONS[stage])
        # Answers and features are of these dtypes; the engine's sizes may differ, as machines do.
        engine = self.run.engine
        settings["engine"] = {"dtype": engine.dtype, "cache_dtype": engine.cache_dtype}
        # A resumed run may have another command.
        settings.get("export", {}).pop("command", None)
        return settings

    def begin_anew(self) -> list[str]:
        """Sets stages aside that were begun with other settings, but not prompts and answers.

        Returns:
          A line for each such stage.

        Raises:
          ConfigError: prompts or answers are those of another run.
        """
        for stage in STAGES[: STAGES.index("vocabulary")]:
            if (self.output / stage).is_dir():
                self._folder(stage)
        return set_aside(
            self.output, {stage: self._settings(stage) for stage in STAGES[STAGES.index("vocabulary") :]}
        )

    def _finished(self, stage: str) -> StageFolder:
        folder = self._folder(stage) if (self.output / stage).is_dir() else None
        if folder is None or not folder.is_done:
            raise ConfigError(f"{self.output}: the stage {stage!r} is not finished; run it first")
        return folder

    def _engine(self, max_model_len: int, drafter: Drafter | None = None) -> Engine:
        config = dataclasses.replace(self.run.engine, max_model_len=max_model_len)
        if config.num_pages is None:
            slots = fitting_slots(self.target, config.batch_size, max_model_len, memory=device_memory())
            config = config.with_batch_size(slots)
        if config.mixed_prefill_tokens is None and platform() != "cpu":
            # Many slots with short answers need many new prompts; nobody waits for a single token here.
            rows = max(_MIXED_TOKENS_PER_SLOT * config.batch_size, 1024)
            config = dataclasses.replace(
                config, mixed_prefill_tokens=rows, prefill_batch_size=rows // (config.prefill_chunk or 64)
            )
        if config.slot_sizes is None:
            # It runs for a minute or two: more programs would take longer to compile than they save.
            config = dataclasses.replace(config, slot_sizes=(max(config.batch_size // 8, 1),))
        return Engine(
            self.target,
            drafter or NoDrafter(),
            # Answers are kept as token ids; decoding them would take the host more time than everything else.
            tokenizer=None,
            eos_token_ids=self.checkpoint.eos_token_ids,
            config=config,
            # Answers use neither top-k nor top-p; the program for temperatures also serves greedy ones.
            sampling_modes=(SamplingMode.TEMPERATURE,)
            if drafter is None
            else (SamplingMode.GREEDY, SamplingMode.TEMPERATURE),
        )

    @property
    def _most_positions(self) -> int:
        return target_config(self.checkpoint).max_position_embeddings

    def _positions(self, prompts: TokenRows, max_new_tokens: int) -> int:
        """The number of positions that a slot needs for the longest prompt and its answer."""
        longest = int(prompts.length.max()) if len(prompts) else 0
        return min(longest + max_new_tokens, self._most_positions)

    def _prompts(self, folder: StageFolder) -> None:
        config, most = self.run.prompts, self._most_positions
        for name in self.run.evaluate.files:
            self._evaluation_prompts(name)  # so that a bad file is named before hours of training
        engine = self._engine(min(64 + config.synthetic_max_tokens, most)) if config.synthetic else None
        # Leave room for an answer.
        longest = max(most - self.run.responses.max_new_tokens, most // 2)
        make_prompts(
            config,
            self.tokenizer,
            folder,
            data=self.data,
            engine=engine,
            longest=longest,
            ends=self.checkpoint.eos_token_ids,
        )

    def _read(self, name: str) -> TokenRows:
        return TokenRows.load(self._finished("prompts").path / name)

    def _responses(self, folder: StageFolder) -> None:
        prompts = self._read(PROMPTS)
        positions = self._positions(prompts, self.run.responses.max_new_tokens)
        make_responses(
            self.run.responses, prompts, self._read(ANSWERS), folder, lambda: self._engine(positions)
        )

    def _vocabulary(self, folder: StageFolder) -> None:
        answers = read_shards(self._finished("responses").path)
        counts = token_counts(answers.tokens, self.target.config.vocab_size)
        known = None if self._initial is None else self._initial.target_ids
        target_ids = choose_vocabulary(
            counts, self.head_config.draft_vocab_size, known=None if known is None else np.asarray(known[...])
        )
        np.save(folder.path / VOCABULARY, target_ids)
        sizes = [2**i for i in range(10, 16) if 2**i < counts.size]
        folder.finish(
            size=int(target_ids.size),
            coverage=coverage(counts, target_ids),
            coverage_by_size={size: coverage(counts, choose_vocabulary(counts, size)) for size in sizes},
        )

    @property
    def _most_frequent(self) -> np.ndarray:
        """i32[W]: the draft vocabulary, the most frequent token first."""
        return np.load(self._finished("vocabulary").path / VOCABULARY, allow_pickle=False)

    def _new_head(self) -> Eagle3:
        return new_head(
            self.head_config,
            self.target,
            np.sort(self._most_frequent),
            num_speculative_tokens=self.run.evaluate.num_speculative_tokens,
            seed=self.run.train.seed,
        )

    def _conversations(self) -> Conversations:
        answers = read_shards(self._finished("responses").path)
        return join_answers(self._read(PROMPTS), answers, longest=self._most_positions)

    @property
    def _fewest_steps(self) -> int:
        on_cpu = self._devices[0].platform == "cpu"
        return FEWEST_STEPS_TO_ADAPT_ON_A_CPU if on_cpu and self.run.head.initial else FEWEST_STEPS

    def _train(self, folder: StageFolder) -> None:
        head = self._new_head()
        if self._initial is not None:
            start_from(head, self._initial, self.target)
        conversations = self._conversations()
        config = read_sizes(folder.path)
        if config is None:
            config = resolve_sizes(
                self.run.train,
                head,
                self.target,
                np.diff(conversations.start),
                memory=device_memory(),
                devices=len(self._devices),
                fewest_steps=self._fewest_steps,
            )
            save_sizes(config, folder.path)
        train(head, self.target, conversations, config, folder, self._devices)

    def _trained(self) -> tuple[Trainer, TrainState]:
        """The trainer and its last state, averaged with the initial head if the run asks for it."""
        folder = self._finished("train").path
        config = read_sizes(folder) or self.run.train
        trainer, state = restore_head(self._new_head(), self.target, config, folder, self._devices)
        if weight := self.run.average.initial:
            state = trainer.averaged(state, nnx.state(self._initial, is_trained), weight)
        return trainer, state

    def _initial_source(self) -> DrafterConfig:
        name = self.run.head.initial
        near = self.data / name
        return DrafterConfig(
            kind="eagle3",
            source=str(near) if near.exists() else name,
            num_speculative_tokens=self.run.evaluate.num_speculative_tokens,
        )

    def _initial_config(self, target: ModelConfig) -> Eagle3Config:
        checkpoint = open_drafter(self._initial_source())
        return Eagle3Config.from_hf(checkpoint.config, checkpoint.tensors, target)

    @cached_property
    def _initial(self) -> Eagle3 | None:
        """The head to start from, in float32."""
        if not self.run.head.initial:
            return None
        head = load_drafter(self._initial_source(), self.target, Build(jnp.dtype(jnp.float32)))
        assert isinstance(head, Eagle3)
        return head

    def _baseline(self) -> Drafter:
        """The baseline for the trained head: the initial head, else prompt lookup."""
        config = self._initial_source() if self.run.head.initial else None
        if config is None:
            config = DrafterConfig("ngram", self.run.evaluate.num_speculative_tokens)
        return load_drafter(config, self.target, Build(self.target.output_kernel.dtype))

    def _evaluation_prompts(self, name: str) -> list[list[int]]:
        """Token ids of the prompts of one of `evaluate.files`."""
        return encode_fitting(
            self.tokenizer,
            self.data / name,
            positions=self._most_positions,
            max_new_tokens=self.run.evaluate.max_new_tokens,
        )

    def _evaluate(self, folder: StageFolder) -> None:
        config, prompts = self.run.evaluate, {}
        held_out = [ids.tolist() for ids in self._read(HELD_OUT).sequences()]
        if held_out:
            prompts["held-out"] = held_out
        prompts |= {name: self._evaluation_prompts(name) for name in config.files}
        most = max((len(ids) for each in prompts.values() for ids in each), default=1)
        positions = min(most + config.max_new_tokens, self._most_positions)
        trainer, state = self._trained()
        after = measure(self._engine(positions, trainer.head(state)), prompts, config)
        del trainer, state
        engine = self._engine(positions, self._baseline())
        before = measure(engine, prompts, config, label="evaluate before")
        results = after | {f"before, {name}": result for name, result in before.items()}
        (folder.path / ACCEPTANCE).write_text(json.dumps(results, indent=2), "utf-8")
        folder.finish(
            acceptance_length={name: result["acceptance_length"] for name, result in results.items()},
            compared={name: comparison(before[name], result) for name, result in after.items()},
        )

    def _export(self, folder: StageFolder) -> None:
        trainer, state = self._trained()
        refusal = why_not_safeailab(self.head_config, self.target.config.num_hidden_layers)
        forms = ["speculators", "shared", *([] if refusal else ["safeailab"])]
        name, head = self._target_name, trainer.masters(state)
        for form in forms:
            if not (folder.path / form).exists():
                export_head(
                    head,
                    self.target.config,
                    folder.path / form,
                    form=form,
                    target_name=name,
                    architectures=model_classes(self.checkpoint.config),
                    embedding=embedding_rows(self.target) if form == "speculators" else None,
                    order=draft_order(self._most_frequent),
                    card=self._card(form),
                )
        folder.finish(formats=forms, **({"safeailab": refusal} if refusal else {}))

    @property
    def _target_name(self) -> str:
        return self.run.export.target_name or self.run.target.file or self.run.target.source

    def _card(self, form: str) -> str:
        stages = {
            stage: self._finished(stage).results for stage in ("prompts", "responses", "vocabulary", "train")
        }
        measured = self.output / "evaluate" / ACCEPTANCE
        return head_card(
            self.run,
            self.head_config,
            form=form,
            target_name=self._target_name,
            stages=stages,
            acceptance=json.loads(measured.read_text("utf-8")) if measured.is_file() else {},
            sizes=read_sizes(self._finished("train").path) or self.run.train,
        )
