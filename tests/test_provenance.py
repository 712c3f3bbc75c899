import subprocess

import jax

from jaxspec.provenance import git_revision, provenance


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_revision_says_whether_files_differ(tmp_path):
    assert git_revision(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("1", "utf-8")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "one")
    git(tmp_path, "tag", "v1")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert git_revision(tmp_path) == head
    (tmp_path / "file").write_text("2", "utf-8")
    assert git_revision(tmp_path) == f"{head}-dirty"


def test_no_git_is_no_revision(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_revision(tmp_path) is None


def test_a_result_says_where_it_comes_from(tmp_path):
    about = provenance("scripts/x.py --limit 3", tmp_path)
    assert set(about) == {"command", "git_revision", "versions", "device"}
    assert about["command"] == "scripts/x.py --limit 3"
    assert about["versions"]["jax"] == jax.__version__
    assert about["device"].startswith(f"{jax.device_count()} x ")
