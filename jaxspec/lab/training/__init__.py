"""Training heads: EAGLE-3's from prompts to export, and those of an engine on what it generates."""

from typing import TYPE_CHECKING

from jaxspec.lazy import lazy_names

__all__ = ["Adaptation", "Pipeline", "TrainingRun", "adapt", "load_training_run"]

if TYPE_CHECKING:
    from jaxspec.lab.training.adapter import Adaptation, adapt
    from jaxspec.lab.training.config import TrainingRun, load_training_run
    from jaxspec.lab.training.pipeline import Pipeline
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "jaxspec.lab.training.adapter": "Adaptation adapt",
            "jaxspec.lab.training.config": "TrainingRun load_training_run",
            "jaxspec.lab.training.pipeline": "Pipeline",
        },
    )
