"""What is imported when it is first used: public names of a package, since JAX takes long to import, and
modules around the core."""

import importlib
import sys
from importlib.util import find_spec

TYPE_CHECKING = False  # see `jaxspec`
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def outside(room: str) -> "Any":
    """A package or module of jaxspec that the core does without until a feature of it is used.

    `tests/test_imports.py` lists who calls this.
    """
    return importlib.import_module(f"jaxspec.{room}")


def lazy_names(
    package: str, modules: "Mapping[str, str]"
) -> "tuple[Callable[[str], Any], Callable[[], list[str]]]":
    """`__getattr__` and `__dir__` of a package, whose modules are also imported as its attributes.

    Args:
      package: its `__name__`.
      modules: names, separated by spaces, by the module that defines them.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def getattribute(name: str) -> "Any":
        if name in module_of:
            value = getattr(importlib.import_module(module_of[name]), name)
            setattr(sys.modules[package], name, value)
            return value
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(
            f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package]
        )

    return getattribute, lambda: sorted({*vars(sys.modules[package]), *module_of})
