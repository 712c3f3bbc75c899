"""Speculative decoding for JAX: draft, verify and emit in one compiled step.

    import jaxspec

    engine = jaxspec.load("smollm2-135m")
    print(engine.generate("Why is the sky blue?", max_new_tokens=64).text)

A drafter proposes K tokens, and the target model verifies them in one pass. The output is exactly what the
target alone would have produced: the same tokens if greedy, the same distribution if sampled.

- `load` returns an `Engine` for a configuration (`list_configs`) or a checkpoint; `generate` answers prompts
  in one call.
- `Engine.generate`, `stream` and `run` answer prompts with `SamplingParams`; an answer is a `Generation` with
  `AcceptanceStats`. Any thread may call an engine; `AsyncEngine` is for asyncio.
- `Engine.sample` draws samples as arrays for a training step; `Engine.score` gives the log-probabilities of
  texts; `Engine.update_weights` replaces the weights while the engine runs.
- `check_lossless` compares answers with and without a drafter; `inspect_steps` records an answer's steps.
- `register_drafter` and `register_family` add your own drafters and model families.
"""

from jaxspec.lazy import lazy_names

TYPE_CHECKING = False  # type checkers take it as true; to import `typing` is half of the time that this takes

__version__ = "0.1.0"

__path__.append(f"{__path__[0]}/moved")

__all__ = [
    "AcceptanceStats",
    "AsyncEngine",
    "CheckpointError",
    "ConfigError",
    "Delta",
    "DrafterConfig",
    "Engine",
    "EngineConfig",
    "EngineError",
    "Generation",
    "QueueFullError",
    "Request",
    "Samples",
    "SamplingParams",
    "Scores",
    "check_lossless",
    "generate",
    "inspect_steps",
    "list_configs",
    "load",
    "register_drafter",
    "register_family",
]

if TYPE_CHECKING:
    from jaxspec.config import ConfigError, DrafterConfig, EngineConfig, list_configs
    from jaxspec.drafters.registry import register_drafter
    from jaxspec.engine import (
        AcceptanceStats,
        AsyncEngine,
        Delta,
        Engine,
        EngineError,
        Generation,
        QueueFullError,
        Request,
        Samples,
        Scores,
    )
    from jaxspec.engine.api.load import generate, load
    from jaxspec.files import CheckpointError
    from jaxspec.lab.inspection import inspect_steps
    from jaxspec.lab.lossless import check_lossless
    from jaxspec.models.registry import register_family
    from jaxspec.sampling import SamplingParams
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "jaxspec.files": "CheckpointError",
            "jaxspec.config": "ConfigError DrafterConfig EngineConfig list_configs",
            "jaxspec.drafters.registry": "register_drafter",
            "jaxspec.engine": (
                "AcceptanceStats AsyncEngine Delta Engine EngineError Generation QueueFullError Request "
                "Samples Scores"
            ),
            "jaxspec.engine.api.load": "generate load",
            "jaxspec.lab.inspection": "inspect_steps",
            "jaxspec.lab.lossless": "check_lossless",
            "jaxspec.models.registry": "register_family",
            "jaxspec.sampling": "SamplingParams",
        },
    )
