"""Drafters. Each is a file here and a line below; `register_drafter` adds others from outside."""

from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.eagle1 import Eagle1
from jaxspec.drafters.eagle3 import Eagle3
from jaxspec.drafters.mtp import Mtp
from jaxspec.drafters.ngram import NGramDrafter
from jaxspec.drafters.none import NoDrafter
from jaxspec.drafters.peagle import PEagle
from jaxspec.drafters.registry import register_drafter

register_drafter("ngram", NGramDrafter)
register_drafter("eagle3", Eagle3)
register_drafter("eagle1", Eagle1)
register_drafter("peagle", PEagle)
register_drafter("dflash", DFlash)
register_drafter("draft_model", DraftModel)
register_drafter("mtp", Mtp)
register_drafter("none", NoDrafter)
