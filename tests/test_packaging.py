"""What pyproject.toml installs is what the repository holds."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]


def folder_of(package):
    """Where a package's files are: by the longest entry of package-dir that it falls under."""
    parts = package.split(".")
    for length in range(len(parts), 0, -1):
        folder = SETUPTOOLS["package-dir"].get(".".join(parts[:length]))
        if folder is not None:
            return ROOT.joinpath(folder, *parts[length:])
    raise AssertionError(f"no package-dir for {package}")


def test_every_folder_of_code_is_a_package_and_every_package_a_folder():
    packages = {folder_of(package) for package in SETUPTOOLS["packages"]}
    code = {path.parent for folder in ("jaxspec", "kernels") for path in (ROOT / folder).rglob("*.py")}
    assert {path.relative_to(ROOT) for path in packages - {ROOT / "configs"}} == {
        path.relative_to(ROOT) for path in code
    }


def test_every_configuration_is_installed():
    folder = ROOT / "configs"
    patterns = SETUPTOOLS["package-data"]["jaxspec.configs"]
    assert set(folder.glob("*.toml")) <= {path for pattern in patterns for path in folder.glob(pattern)}
