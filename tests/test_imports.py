"""Modules import only from floors below their own in docs/design.md, and kernels never import jaxspec."""

import ast
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from jaxspec.drafters.registry import DRAFTERS
from jaxspec.models.registry import FAMILIES

ROOT = Path(__file__).parents[1]
FLOORS = (
    ("scripts",),  # and the package's command lines
    ("lab/integrations",),
    ("lab", "lab/training"),
    ("service/serve", "service/batch"),
    ("service/rows",),
    ("service/openai",),
    ("grammar",),
    # The core, which imports nothing from above.
    ("engine/api",),
    ("engine/rounds",),
    ("engine/device",),
    ("engine/host",),
    ("engine",),  # its errors
    ("drafters/kinds",),
    ("drafters",),
    ("models/families",),
    ("models",),
    ("models/layers",),
    ("weights", "attention", "sampling"),
    ("sharding",),
    ("kernels",),
    ("config", "files", "provenance"),
    ("interpreter", "jax_settings"),
    ("errors", "spelling", "installation", "documents", "lazy", "registry"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
AROUND = {room for room in FLOOR_OF if FLOOR_OF[room] <= FLOOR_OF["grammar"]}
"""Rooms around the core."""
MOST_FILES = 16
"""Of a folder of the core."""
OUTSIDE = {
    ("jaxspec/engine/host/answer.py", "lab.show"),
    ("jaxspec/engine/host/statistics.py", "lab.show"),
    ("jaxspec/engine/host/grammars.py", "grammar"),
}
"""Where the core imports what is around it late, by `lazy.outside`: how answers look in a notebook, and what
compiles a grammar."""
FILES = sorted(
    path.relative_to(ROOT)
    for folder in ("jaxspec", "kernels", "scripts")
    for path in (ROOT / folder).rglob("*.py")
)
PUBLIC_NAMES = Path("jaxspec/__init__.py")
MOVED = Path("jaxspec/moved")


IMPORTING = {"engine": "engine/api", "models": "models/families", "drafters": "drafters/kinds"}
"""Packages that import the names of the rooms in them, and the highest of these."""


def room_of(module):
    """The room that a module belongs to, from its dotted name; None outside of the project."""
    top, _, rest = module.partition(".")
    if top == "jaxspec_kernels":
        return "kernels"
    if top != "jaxspec":
        return None
    if rest in IMPORTING:
        return IMPORTING[rest]
    parts = rest.split(".")
    for length in (2, 1):
        if (room := "/".join(parts[:length])) in FLOOR_OF:
            return room
    inside = [room for room in FLOOR_OF if room.startswith(f"{parts[0]}/")]
    return inside[-1] if inside else "scripts"  # public names are for scripts


def room_of_file(path):
    module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    return {"scripts": "scripts", "kernels": "kernels"}.get(path.parts[0]) or room_of(module)


def imported_modules(source):
    """Dotted names of all imports in a file, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they go"
            yield node.module
            is_package = (ROOT / node.module.replace(".", "/")).is_dir()
            yield from (f"{node.module}.{alias.name}" for alias in node.names if is_package)
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
        ("jaxspec/config/toml.py", "from jaxspec.files import Checkpoint"),
        ("jaxspec/weights/loading.py", "from jaxspec.sampling import sample"),
        ("jaxspec/weights/loading.py", "from jaxspec import sampling"),
        ("jaxspec/models/decoder.py", "from jaxspec.models.families.llama import Llama"),
        ("jaxspec/models/decoder.py", "from jaxspec.models import Llama"),
        ("jaxspec/models/layers/moe.py", "from jaxspec.models import decoder"),
        ("jaxspec/models/families/llama.py", "def f():\n    import jaxspec.drafters.base"),
        ("jaxspec/engine/host/pages.py", "from jaxspec.engine.device.step import Models"),
        ("jaxspec/engine/rounds/core.py", "from jaxspec.engine import Engine"),
        ("jaxspec/engine/api/load.py", "from jaxspec.grammar import compile_grammar"),
        ("jaxspec/engine/api/load.py", "import jaxspec.service.batch"),
        ("jaxspec/engine/api/load.py", "from jaxspec import load"),
        ("jaxspec/service/rows/row.py", "from jaxspec.lab import plots"),
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
        and room_of_file(path) != "lab/training"
        and ".".join(path.with_suffix("").parts) not in registered
        and path not in registering
    ]
    assert len(others) > 50
    for path in others:
        assert not registered & set(imported_modules((ROOT / path).read_text("utf-8"))), path


def test_every_room_has_its_floor():
    packages = {path.parts[1] for path in FILES if path.parts[0] == "jaxspec" and len(path.parts) > 2}
    assert packages <= {*(room.partition("/")[0] for room in FLOOR_OF), "commands", MOVED.name}
    assert {room_of_file(path) for path in FILES} == set(FLOOR_OF)


def in_core(path):
    return path.parts[0] == "jaxspec" and room_of_file(path) not in AROUND


def test_no_folder_of_the_core_has_more_files_than_one_can_hold_in_mind():
    files = Counter(path.parent for path in FILES if in_core(path))
    assert {str(folder): number for folder, number in files.items() if number > MOST_FILES} == {}
    assert len(files) > 15


def imported_late(source):
    """The rooms that a file imports by `lazy.outside`, and modules that it imports by name in another way."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            named = isinstance(node.args[0], ast.Constant) if node.args else False
            if name == "outside":
                yield node.args[0].value if named else None
            elif name == "import_module" and named:
                yield node.args[0].value


def test_what_the_core_imports_late_is_listed():
    late = {
        (str(path), room)
        for path in FILES
        if in_core(path) and path != Path("jaxspec/lazy.py")
        for room in imported_late((ROOT / path).read_text("utf-8"))
    }
    assert late == OUTSIDE
