"""Sampling: temperature, top-k, top-p and min-p; Gumbel draws; rejection sampling of drafts."""

from typing import TYPE_CHECKING

from jaxspec.lazy import lazy_names

__all__ = [
    "DEFAULT_MAX_NEW_TOKENS",
    "MAX_BAD_WORD_TOKENS",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_SEQUENCE",
    "Asked",
    "Columns",
    "Constrained",
    "ConstrainedRows",
    "ConstraintState",
    "Constraints",
    "DraftVocabulary",
    "Kind",
    "Logprobs",
    "ManySamplingOptions",
    "SamplingMode",
    "SamplingOptions",
    "SamplingParams",
    "SamplingState",
    "TokenLogprobs",
    "Verdict",
    "can_branch",
    "generation_defaults",
    "modes_for_sampling",
    "process_logits",
    "required_constraints",
    "required_logprobs",
    "required_mode",
    "sample",
    "sample_seed",
    "seed_words",
    "token_logprobs",
    "verify",
    "verify_synthetic",
]

if TYPE_CHECKING:
    from jaxspec.sampling.asked import Asked
    from jaxspec.sampling.constraints import (
        Columns,
        Constrained,
        ConstrainedRows,
        Constraints,
        ConstraintState,
        required_constraints,
    )
    from jaxspec.sampling.defaults import generation_defaults
    from jaxspec.sampling.draw import sample
    from jaxspec.sampling.logits import process_logits
    from jaxspec.sampling.logprobs import Logprobs, TokenLogprobs, required_logprobs, token_logprobs
    from jaxspec.sampling.mode import SamplingMode, can_branch, modes_for_sampling, required_mode
    from jaxspec.sampling.params import (
        DEFAULT_MAX_NEW_TOKENS,
        MAX_BAD_WORD_TOKENS,
        MAX_LOGIT_BIAS,
        MAX_LOGPROBS,
        MAX_SEQUENCE,
        Kind,
        ManySamplingOptions,
        SamplingOptions,
        SamplingParams,
        sample_seed,
    )
    from jaxspec.sampling.rejection import Verdict, verify
    from jaxspec.sampling.state import SamplingState, seed_words
    from jaxspec.sampling.synthetic import verify_synthetic
    from jaxspec.sampling.vocabulary import DraftVocabulary
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "jaxspec.sampling.asked": "Asked",
            "jaxspec.sampling.constraints": "Columns Constrained ConstrainedRows Constraints ConstraintState "
            "required_constraints",
            "jaxspec.sampling.defaults": "generation_defaults",
            "jaxspec.sampling.draw": "sample",
            "jaxspec.sampling.logits": "process_logits",
            "jaxspec.sampling.logprobs": "Logprobs TokenLogprobs required_logprobs token_logprobs",
            "jaxspec.sampling.mode": "SamplingMode can_branch modes_for_sampling required_mode",
            "jaxspec.sampling.params": "DEFAULT_MAX_NEW_TOKENS MAX_BAD_WORD_TOKENS MAX_LOGIT_BIAS "
            "MAX_LOGPROBS MAX_SEQUENCE Kind ManySamplingOptions SamplingOptions SamplingParams sample_seed",
            "jaxspec.sampling.rejection": "Verdict verify",
            "jaxspec.sampling.state": "SamplingState seed_words",
            "jaxspec.sampling.synthetic": "verify_synthetic",
            "jaxspec.sampling.vocabulary": "DraftVocabulary",
        },
    )
