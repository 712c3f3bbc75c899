"""pyproject.toml installs what the repository holds."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]


def test_folders_lie_where_packages_are_looked_for():
    assert SETUPTOOLS["packages"]["find"]["where"] == [".", "src"]
    assert (ROOT / "src" / "jaxspec_kernels").samefile(ROOT / "kernels")
    assert (ROOT / "jaxspec" / "configs").samefile(ROOT / "configs")


@pytest.mark.parametrize("folder", ["jaxspec", "kernels", "configs"])
def test_every_folder_of_code_is_a_package(folder):
    code = {path.parent for path in (ROOT / folder).rglob("*.py")}
    assert code
    assert [path for path in code if not (path / "__init__.py").exists()] == []


def test_every_configuration_is_installed():
    folder = ROOT / "configs"
    patterns = SETUPTOOLS["package-data"]["jaxspec.configs"]
    assert set(folder.glob("*.toml")) <= {path for pattern in patterns for path in folder.glob(pattern)}
