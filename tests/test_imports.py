"""Modules import only from floors below their own in docs/design.md, and kernels never import jaxspec."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from jaxspec.drafters.registry import DRAFTERS
from jaxspec.models.registry import FAMILIES

ROOT = Path(__file__).parents[1]
FLOORS = (
    ("scripts", "integrations"),  # and the package's command lines
    ("training", "batch", "serve"),
    ("rows",),
    ("openai",),
    ("engine",),
    ("drafters",),
    ("models", "sampling"),
    ("attention", "grammar"),
    ("sharding",),
    ("kernels",),
    ("config", "checkpoints", "provenance"),
    ("interpreter", "jax_settings"),
    ("errors", "documents", "installation", "lazy", "registry", "spelling"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(
    path.relative_to(ROOT)
    for folder in ("jaxspec", "kernels", "scripts")
    for path in (ROOT / folder).rglob("*.py")
)
PUBLIC_NAMES = Path("jaxspec/__init__.py")


def room_of(module):
    """The room that a module belongs to, from its dotted name; None outside of the project."""
    top, _, rest = module.partition(".")
    if top == "jaxspec_kernels":
        return "kernels"
    if top != "jaxspec":
        return None
    room = rest.partition(".")[0]
    return room if room in FLOOR_OF else "scripts"  # public names are for scripts


def room_of_file(path):
    module = ".".join(path.with_suffix("").parts)
    return {"scripts": "scripts", "kernels": "kernels"}.get(path.parts[0]) or room_of(module)


def imported_modules(source):
    """Dotted names of all imports in a file, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they go"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "jaxspec")
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def upward_imports(path, source):
    own = room_of_file(path)
    for module in imported_modules(source):
        other = room_of(module)
        if other in (None, own):
            continue
        if FLOOR_OF[other] <= FLOOR_OF[own] or own == "kernels":
            yield module


def test_imports_go_down_the_list():
    upward = {
        str(path): modules
        for path in FILES
        if path != PUBLIC_NAMES and (modules := list(upward_imports(path, (ROOT / path).read_text("utf-8"))))
    }
    assert upward == {}


def imports_of(sources):
    """The modules that each module imports, from sources by module; also inside functions and for types."""
    graph = {module: set() for module in sources}
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                named = (f"{node.module}.{alias.name}" for alias in node.names)
                graph[module] |= {name if name in sources else node.module for name in named}
            elif isinstance(node, ast.Import):
                graph[module] |= {alias.name for alias in node.names}
    return {module: others & graph.keys() for module, others in graph.items()}


def test_no_modules_import_each_other_in_a_circle():
    """Not even for their types. `jaxspec` itself imports its public names late."""
    sources = {
        ".".join(path.with_suffix("").parts).removesuffix(".__init__"): (ROOT / path).read_text("utf-8")
        for path in FILES
        if path.parts[0] == "jaxspec" and path != PUBLIC_NAMES
    }
    TopologicalSorter(imports_of(sources)).prepare()


def test_a_circle_would_be_seen():
    sources = {"a.b": "if TYPE_CHECKING:\n    from a.c import X", "a.c": "from a import b"}
    with pytest.raises(CycleError):
        TopologicalSorter(imports_of(sources)).prepare()


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/argmax.py", "import jaxspec"),
        ("kernels/argmax.py", "from jaxspec.config import Config"),
        ("jaxspec/config.py", "from jaxspec.checkpoints import Checkpoint"),
        ("jaxspec/models/llama.py", "from jaxspec.sampling import sample"),
        ("jaxspec/models/llama.py", "from jaxspec import sampling"),
        ("jaxspec/models/llama.py", "def f():\n    import jaxspec.drafters.base"),
        ("jaxspec/engine/load.py", "import jaxspec.batch"),
        ("jaxspec/engine/load.py", "from jaxspec import load"),
    ],
)
def test_an_import_upwards_would_be_seen(path, source):
    assert list(upward_imports(Path(path), source))


def test_only_where_it_is_registered_is_a_family_or_a_drafter_known():
    """Exceptions: related families or drafters, and training, which is for EAGLE-3 heads."""
    registered = {entry.__module__ for entry in (*DRAFTERS.values(), *FAMILIES.values())}
    registering = {Path("jaxspec/drafters/__init__.py"), Path("jaxspec/models/__init__.py")}
    others = [
        path
        for path in FILES
        if path.parts[0] == "jaxspec"
        and room_of_file(path) != "training"
        and ".".join(path.with_suffix("").parts) not in registered
        and path not in registering
    ]
    assert len(others) > 50
    for path in others:
        assert not registered & set(imported_modules((ROOT / path).read_text("utf-8"))), path


def test_every_room_has_its_floor():
    packages = {path.parts[1] for path in FILES if path.parts[0] == "jaxspec" and len(path.parts) > 2}
    assert packages <= {*FLOOR_OF, "commands"}
    assert {room_of_file(path) for path in FILES} == set(FLOOR_OF)
