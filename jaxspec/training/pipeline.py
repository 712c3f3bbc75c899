"""The stages of a training run, each of which can be run, interrupted and run again by itself."""

import dataclasses
import json
from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints import Checkpoint, Tokenizer, open_checkpoint
from jaxspec.config import ConfigError, DrafterConfig
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.eagle3 import Eagle3
from jaxspec.drafters.loading import Build, load_drafter
from jaxspec.drafters.none import NoDrafter
from jaxspec.engine import Engine
from jaxspec.models.decoder import Decoder
from jaxspec.models.loading import load_target, target_config
from jaxspec.sampling import SamplingMode
from jaxspec.training.config import TrainingRun
from jaxspec.training.draft_vocabulary import VOCABULARY, choose_vocabulary, coverage, token_counts
from jaxspec.training.evaluate import evaluate_head
from jaxspec.training.export import export_head, why_not_safeailab
from jaxspec.training.head import head_config, new_head, start_from
from jaxspec.training.packing import join_answers
from jaxspec.training.prompts import PROMPTS, check_tokenizer, make_prompts
from jaxspec.training.responses import make_responses
from jaxspec.training.stage_folder import StageFolder, check_output
from jaxspec.training.token_rows import TokenRows, read_shards
from jaxspec.training.train import restore_head, train

# The sections of the configuration that decide what a stage's folder holds.
_DECISIVE = {
    "prompts": ("target", "prompts"),
    "responses": ("target", "prompts", "responses"),
    "vocabulary": ("target", "prompts", "responses", "vocabulary"),
    "train": ("target", "prompts", "responses", "vocabulary", "head", "train"),
    "evaluate": ("target", "prompts", "responses", "vocabulary", "head", "train", "evaluate"),
    "export": ("target", "prompts", "responses", "vocabulary", "head", "train"),
}


class Pipeline:
    """One training run in one output folder."""

    def __init__(self, run: TrainingRun, output: Path, *, data: Path):
        """
        Args:
          data: the folder that the configuration's file names start from.

        Raises:
          ConfigError: the output folder is not one of a training run, or the head cannot be built.
          CheckpointError: the target cannot be opened.
        """
        check_output(output)
        self.run, self.output, self.data = run, output, data
        source = run.target
        self.checkpoint: Checkpoint = open_checkpoint(source.source, file=source.file, sha256=source.sha256)
        shape = target_config(self.checkpoint)
        if not 1 <= run.vocabulary.size <= shape.vocab_size:
            raise ConfigError(
                f"vocabulary.size must be between 1 and the target's vocabulary of {shape.vocab_size}, "
                f"got {run.vocabulary.size}"
            )
        self.head_config = head_config(run.head, shape, run.vocabulary.size)
        self.tokenizer: Tokenizer = check_tokenizer(self.checkpoint.tokenizer, source.source)

    def run_stage(self, name: str) -> dict:
        """Runs a stage, or continues it; returns what it reports. A finished stage is not run again.

        Raises:
          ConfigError: an earlier stage is missing, or the folder belongs to another run.
        """
        folder = self._folder(name)
        if not folder.is_done:
            getattr(self, f"_{name}")(folder)
        return folder.results

    @cached_property
    def target(self) -> Decoder:
        limit = target_config(self.checkpoint).max_position_embeddings
        engine = self.run.engine.resolve(backend=jax.default_backend(), model_limit=limit)
        return load_target(self.checkpoint, dtype=jnp.dtype(engine.dtype))

    def _folder(self, stage: str) -> StageFolder:
        return StageFolder(self.output, stage, self.run.settings(*_DECISIVE[stage]))

    def _finished(self, stage: str) -> StageFolder:
        folder = self._folder(stage) if (self.output / stage).is_dir() else None
        if folder is None or not folder.is_done:
            raise ConfigError(f"{self.output}: the stage {stage!r} is not finished; run it first")
        return folder

    def _engine(self, max_model_len: int, drafter: Drafter | None = None) -> Engine:
        return Engine(
            self.target,
            drafter or NoDrafter(),
            # Answers are kept as token ids: turning them into text would cost the host more than the rest.
            tokenizer=None,
            eos_token_ids=self.checkpoint.eos_token_ids,
            config=dataclasses.replace(self.run.engine, max_model_len=max_model_len),
            # No answer is truncated by top-k or top-p; this one program serves greedy answers as well.
            sampling_modes=(SamplingMode.TEMPERATURE,)
            if drafter is None
            else (SamplingMode.GREEDY, SamplingMode.TEMPERATURE),
        )

    def _prompts(self, folder: StageFolder) -> None:
        config = self.run.prompts
        engine = self._engine(64 + config.synthetic_max_tokens) if config.synthetic else None
        make_prompts(config, self.tokenizer, folder, data=self.data, engine=engine)

    def _responses(self, folder: StageFolder) -> None:
        prompts = TokenRows.load(self._finished("prompts").path / PROMPTS)
        longest = self.run.prompts.max_tokens + self.run.responses.max_new_tokens
        make_responses(self.run.responses, prompts, folder, self._engine(longest))

    def _vocabulary(self, folder: StageFolder) -> None:
        answers = read_shards(self._finished("responses").path)
        counts = token_counts(answers.tokens, self.target.config.vocab_size)
        target_ids = choose_vocabulary(counts, self.run.vocabulary.size)
        np.save(folder.path / VOCABULARY, target_ids)
        sizes = [2**i for i in range(10, 16) if 2**i < counts.size]
        folder.finish(
            size=int(target_ids.size),
            coverage=coverage(counts, target_ids),
            coverage_by_size={size: coverage(counts, choose_vocabulary(counts, size)) for size in sizes},
        )

    def _new_head(self) -> Eagle3:
        return new_head(
            self.head_config,
            self.target,
            np.load(self._finished("vocabulary").path / VOCABULARY, allow_pickle=False),
            num_speculative_tokens=self.run.evaluate.num_speculative_tokens,
            seed=self.run.train.seed,
        )

    def _train(self, folder: StageFolder) -> None:
        head = self._new_head()
        if self.run.head.initial:
            start_from(head, self._exported(self.data / self.run.head.initial))
        prompts = TokenRows.load(self._finished("prompts").path / PROMPTS)
        answers = read_shards(self._finished("responses").path)
        train(head, self.target, join_answers(prompts, answers), self.run.train, folder)

    def _exported(self, folder: Path) -> Drafter:
        source = DrafterConfig(
            kind="eagle3",
            source=str(folder),
            num_speculative_tokens=self.run.evaluate.num_speculative_tokens,
        )
        return load_drafter(source, self.target, Build(jnp.dtype(jnp.float32)))

    def _evaluate(self, folder: StageFolder) -> None:
        trained = self._finished("train").path
        trainer, state = restore_head(self._new_head(), self.target, self.run.train, trained)
        engine = self._engine(self.run.engine.max_model_len or 2048, trainer.head(state))
        results = evaluate_head(engine, self.tokenizer, self.run.evaluate, data=self.data)
        (folder.path / "acceptance.json").write_text(json.dumps(results, indent=2), "utf-8")
        lengths = {name: result["acceptance_length"] for name, result in results.items()}
        folder.finish(acceptance_length=lengths)

    def _export(self, folder: StageFolder) -> None:
        trained = self._finished("train").path
        trainer, state = restore_head(self._new_head(), self.target, self.run.train, trained)
        refusal = why_not_safeailab(self.head_config, self.target.config.num_hidden_layers)
        forms = ["speculators", "shared", *([] if refusal else ["safeailab"])]
        name, head = self.run.target.file or self.run.target.source, trainer.masters(state)
        for form in forms:
            if not (folder.path / form).exists():
                export_head(
                    head,
                    self.target.config,
                    folder.path / form,
                    form=form,
                    target_name=name,
                    architectures=self.checkpoint.config.get("architectures") or (),
                )
        folder.finish(formats=forms, **({"safeailab": refusal} if refusal else {}))
