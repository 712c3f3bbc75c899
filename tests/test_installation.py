"""What an error says to install, by where the package came from."""

import json
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from jaxspec import installation
from jaxspec.installation import distribution, install_command, needs, optional

ROOT = Path(__file__).parents[1]
NAME = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["name"]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a distribution's metadata into a folder of packages, the only one there is, which holds this code
    unless the distribution is an editable clone."""
    site, discover = tmp_path / "site", metadata.Distribution.discover
    site.mkdir()
    monkeypatch.setattr(metadata, "distributions", lambda: discover(path=[str(site)]))
    monkeypatch.setattr(installation, "__file__", str(site / "jaxspec" / "installation.py"))

    def add(name, direct_url=None, packages="jaxspec\njaxspec_kernels\n"):
        folder = site / f"{name.replace('-', '_')}-0.1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n", "utf-8")
        (folder / "top_level.txt").write_text(packages, "utf-8")
        if direct_url is not None:
            (folder / "direct_url.json").write_text(json.dumps(direct_url), "utf-8")

    return add


def editable(clone):
    return {"url": clone.as_uri(), "dir_info": {"editable": True}}


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A clone with this code, whose path has a space."""
    folder = tmp_path / "a clone"
    folder.mkdir()
    monkeypatch.setattr(installation, "__file__", str(folder / "jaxspec" / "installation.py"))
    return folder


@pytest.mark.parametrize(
    ("direct_url", "where"),
    [
        (None, ""),
        ({"url": "file:///a/x.whl", "archive_info": {}}, " @ file:///a/x.whl"),
        ({"url": "file:///a/clone", "dir_info": {}}, " @ file:///a/clone"),
        (
            {"url": "https://host/x", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            " @ git+https://host/x@ab12",
        ),
    ],
    ids=["index", "wheel", "folder", "git"],
)
def test_an_extra_comes_from_where_the_package_came_from(install, direct_url, where):
    install("of-a-fork", direct_url)
    assert install_command("train") == f'pip install "of-a-fork[train]{where}"'


def test_another_project_of_the_same_name_is_not_this_one(install):
    install("jaxspec", packages="jaxspec\n")
    install(NAME)
    assert install_command("train") == f'pip install "{NAME}[train]"'


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_clone_installs_from_its_folder(install, clone, monkeypatch, is_installed):
    if is_installed:
        install("jaxspec", editable(clone))  # before the distribution had its name
        install(NAME, editable(clone))
        assert distribution().name == NAME
    assert install_command("train") == f'pip install -e "{clone}[train]"'
    monkeypatch.chdir(clone)
    assert install_command("train") == 'pip install -e ".[train]"'


def test_code_of_another_clone_is_not_what_was_installed(install, clone, tmp_path):
    install(NAME, editable(tmp_path / "other"))
    assert distribution() is None
    assert install_command("train") == f'pip install -e "{clone}[train]"'


def test_what_is_missing_is_named_with_what_installs_it():
    line = f"this needs nothing_here, which is not installed: {install_command('plots')}"
    with pytest.raises(ModuleNotFoundError) as missing:
        optional("nothing_here.inside", extra="plots")
    assert (str(missing.value), missing.value.name) == (line, "nothing_here")
    with pytest.raises(ModuleNotFoundError, match=r"^this needs nothing_here, "), needs("plots"):
        import nothing_here  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'jaxspec\.nothing'$"), needs("plots"):
        import jaxspec.nothing  # noqa: F401


def test_every_extra_that_is_named_is_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    files = [path for folder in ("jaxspec", "scripts") for path in (ROOT / folder).rglob("*.py")]
    calls = r'(?:extra=|needs\(|install_command\()["\'](\w[\w-]*)["\']'
    named = {name for path in files for name in re.findall(calls, path.read_text("utf-8"))}
    assert {"train", "serve", "ray", "bench"} <= named <= set(project["optional-dependencies"])


def test_no_page_installs_another_project():
    """Which is what PyPI has under the name of this package."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    code = [path for folder in ("jaxspec", "scripts") for path in (ROOT / folder).rglob("*.py")]
    for path in [*pages, *code]:
        assert "install jaxspec" not in path.read_text("utf-8"), path
        assert "'jaxspec[" not in path.read_text("utf-8"), path


def test_what_a_package_lacks_itself_is_not_called_one_of_ours(tmp_path, monkeypatch):
    """An extra installs the package, which is there, and perhaps not all that its modules import."""
    (tmp_path / "there.py").write_text("import nothing_here", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'nothing_here'$"):
        optional("there", extra="plots")
