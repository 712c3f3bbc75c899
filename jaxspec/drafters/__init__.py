"""Drafters, and what the author of another one imports (docs/writing-a-drafter.md).

Each is a file in `kinds` and a line below; `register_drafter` adds others from outside.
"""

from jaxspec.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.drafters.base import (
    Build,
    Context,
    Description,
    Drafter,
    DrafterReader,
    Needs,
    Proposal,
    Rows,
    Target,
)
from jaxspec.drafters.flags import Flag, key_flag, tensor_flag
from jaxspec.drafters.formats import open_drafter
from jaxspec.drafters.head import Head
from jaxspec.drafters.kinds.dflash import DFlash
from jaxspec.drafters.kinds.draft_model import DraftModel
from jaxspec.drafters.kinds.dspark import DSpark
from jaxspec.drafters.kinds.eagle1 import Eagle1, Eagle1Config
from jaxspec.drafters.kinds.eagle3 import Eagle3, Eagle3Config
from jaxspec.drafters.kinds.gemma4_assistant import Gemma4Assistant
from jaxspec.drafters.kinds.mtp import Mtp
from jaxspec.drafters.kinds.ngram import NGramDrafter
from jaxspec.drafters.kinds.none import NoDrafter
from jaxspec.drafters.kinds.peagle import PEagle
from jaxspec.drafters.one_pass import OnePassDrafter
from jaxspec.drafters.registry import register_drafter

__all__ = [
    "AutoregressiveDrafter",
    "Build",
    "Context",
    "DFlash",
    "DSpark",
    "Description",
    "DraftModel",
    "Drafter",
    "DrafterReader",
    "Eagle1",
    "Eagle1Config",
    "Eagle3",
    "Eagle3Config",
    "Flag",
    "Gemma4Assistant",
    "Head",
    "Mtp",
    "NGramDrafter",
    "Needs",
    "NoDrafter",
    "OnePassDrafter",
    "PEagle",
    "Proposal",
    "Rows",
    "Target",
    "key_flag",
    "open_drafter",
    "register_drafter",
    "tensor_flag",
]

register_drafter("ngram", NGramDrafter)
register_drafter("eagle3", Eagle3)
register_drafter("eagle1", Eagle1)
register_drafter("peagle", PEagle)
register_drafter("dflash", DFlash)
register_drafter("dspark", DSpark)
register_drafter("draft_model", DraftModel)
register_drafter("mtp", Mtp)
register_drafter("gemma4_assistant", Gemma4Assistant)
register_drafter("none", NoDrafter)
