"""What is installed from the repository: an editable installation, a wheel and a source distribution."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import httpx
import pytest
from test_readme import blocks
from tiny_run import write_target

ROOT = Path(__file__).parents[1]
BUILT = ("jaxspec", "kernels", "configs", "src", "pyproject.toml", "README.md", "LICENSE")


def test_src_has_links_to_the_packages_alone():
    """Its path is on `sys.path` of an editable installation, and so is whatever else lies there."""
    names = {path.name for path in (ROOT / "src").iterdir() if not path.name.endswith(".egg-info")}
    assert names == {"jaxspec", "jaxspec_kernels"}
    assert (ROOT / "src" / "jaxspec").samefile(ROOT / "jaxspec")
    assert (ROOT / "src" / "jaxspec_kernels").samefile(ROOT / "kernels")
    assert (ROOT / "jaxspec" / "configs").samefile(ROOT / "configs")


@pytest.mark.parametrize("folder", ["jaxspec", "kernels", "configs"])
def test_every_folder_of_code_is_a_package(folder):
    code = {path.parent for path in (ROOT / folder).rglob("*.py")}
    assert code
    assert [path for path in code if not (path / "__init__.py").exists()] == []


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with all that the build makes: editable/*.whl, wheel/*.whl and sdist/*.tar.gz."""
    clone = tmp_path_factory.mktemp("above") / "jaxspec"
    clone.mkdir()
    for name in BUILT:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, clone / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, clone)
    program = (
        "import os, setuptools.build_meta as build\n"
        "for folder in ('editable', 'wheel', 'sdist'): os.makedirs(folder)\n"
        "build.build_sdist('sdist')\n"
        "build.build_wheel('wheel')\n"
        "build.build_editable('editable')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return clone


def test_an_editable_installation_is_a_path(built):
    """A finder would be asked only after a folder called jaxspec beside the user's script."""
    (wheel,) = (built / "editable").glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        names = [name for name in files.namelist() if ".dist-info/" not in name]
        assert [Path(name).suffix for name in names] == [".pth"]
        path = files.read(names[0]).decode().strip()
    assert path == str(built / "src")
    program = "import importlib.util, sys; sys.path.append(sys.argv[1]); "
    program += "print(importlib.util.find_spec('jaxspec').origin)"
    command = [sys.executable, "-S", "-c", program, path]
    done = subprocess.run(command, cwd=built.parent, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(built / "src" / "jaxspec" / "__init__.py")


def installed_files():
    """The files of the repository that are installed, by their path in a wheel."""
    folders = {"jaxspec": "jaxspec", "kernels": "jaxspec_kernels", "configs": "jaxspec/configs"}
    for folder, name in folders.items():
        for path in (ROOT / folder).rglob("*"):
            inside = path.relative_to(ROOT / folder)
            is_training_run = path.parent == ROOT / "configs" / "training"  # names files of the repository
            if path.is_file() and "__pycache__" not in path.parts and not is_training_run:
                yield f"{name}/{inside}"


def test_wheel_and_source_distribution_hold_every_file(built):
    (wheel,), (sdist,) = (built / "wheel").glob("*.whl"), (built / "sdist").glob("*.tar.gz")
    expected = set(installed_files())
    assert {"jaxspec/py.typed", "jaxspec_kernels/py.typed", "jaxspec/configs/smollm2-135m.toml"} <= expected
    assert "jaxspec/configs/heads/smollm2-135m-eagle3/model.safetensors" in expected
    with zipfile.ZipFile(wheel) as files:
        assert {name for name in files.namelist() if ".dist-info/" not in name} == expected
    with tarfile.open(sdist) as files:
        inside = {name.partition("/src/")[2] for name in files.getnames() if "/src/" in name}
    assert expected <= inside


@pytest.fixture
def shell(built, tmp_path):
    """Starts a command line in an empty folder outside of the clone, with the programs of a fresh environment
    that has the wheel alone."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    of_tests = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
    settings = {name: value for name, value in os.environ.items() if name not in of_tests}
    settings |= {"PATH": f"{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}", "PIP_COMPILE": "0"}

    def run(line, **more):
        words = shlex.split(line)
        program = shutil.which(words[0], path=settings["PATH"])
        return subprocess.Popen([program, *words[1:]], cwd=folder, env=settings, text=True, **more)

    (wheel,) = (built / "wheel").glob("*.whl")
    assert run(f"pip install --quiet {wheel}").wait() == 0
    return run


def told(process):
    """What a process wrote to both streams, and its exit status."""
    said, _ = process.communicate(timeout=300)
    return process.returncode, said


@pytest.mark.timeout(1200)
def test_an_empty_environment_runs_every_command_of_the_wheel(shell, tmp_path):
    """The README's first one with its model, the others with a tiny one. An extra is installed by the line
    that the command which needs it refuses with."""
    to_see = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    first = blocks("sh")[0].rpartition(".venv/bin/")[2]
    status, said = told(shell(first, **to_see))
    assert status == 0, said
    assert "Gravity" in said
    target, asked = write_target(tmp_path / "tiny"), tmp_path / "asked.jsonl"
    rows = [{"prompt": f"say {i} again", "response": f"{i} again"} for i in range(20)]
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    status, said = told(shell(f"jaxspec batch {target} --input {asked} --output out.jsonl", **to_see))
    assert status == 0, said
    written = (tmp_path / "elsewhere" / "out.jsonl").read_text("utf-8").splitlines()
    assert len(written) == len(rows)
    assert not any("error" in json.loads(row) for row in written)
    serve = f"jaxspec serve {target} --port 0"
    small = "--steps 3 --max-new-tokens 8 --row-length 64 --batch-tokens 64 --num-speculative-tokens 2"
    train = f"jaxspec train --target {target} --prompts {asked} --output run {small}"
    for command in (serve, train):
        status, said = told(shell(command, **to_see))
        assert (status, said.count("\n")) == (2, 1), said
        install = said.strip().partition("not installed: ")[2]
        assert shell(install.replace("install", "install --quiet", 1)).wait() == 0, install
    status, said = told(shell(train, **to_see))
    assert status == 0, said
    assert "train: " in said
    server = shell(serve, stderr=subprocess.PIPE)
    try:
        url = next(line for line in server.stderr if "/v1" in line).split()[-1]
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4}
        with httpx.Client(transport=httpx.HTTPTransport(retries=20), timeout=60) as client:
            choices = client.post(f"{url}/completions", json=body).json()["choices"]
        assert choices[0]["text"]
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert server.returncode == 0
