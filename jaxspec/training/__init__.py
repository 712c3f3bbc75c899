"""Training EAGLE-3 heads: prompts, responses, draft vocabulary, training, evaluation and export."""

from typing import TYPE_CHECKING

from jaxspec.lazy import lazy_names

__all__ = ["Pipeline", "TrainingRun", "load_training_run"]

if TYPE_CHECKING:
    from jaxspec.training.config import TrainingRun, load_training_run
    from jaxspec.training.pipeline import Pipeline
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "jaxspec.training.config": "TrainingRun load_training_run",
            "jaxspec.training.pipeline": "Pipeline",
        },
    )
