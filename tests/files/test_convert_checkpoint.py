import subprocess
import sys

from tiny_folder import arrays, assert_same_tensors, write_folder

from jaxspec.files import open_checkpoint


def convert(*arguments):
    command = [sys.executable, "-W", "error", "-m", "jaxspec", "convert", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_writes_orbax(tmp_path):
    done = convert(write_folder(tmp_path / "head"), tmp_path / "out")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/out: 5 tensors from {tmp_path}/head\n")
    assert (tmp_path / "out" / "orbax").is_dir()
    assert_same_tensors(open_checkpoint(tmp_path / "out").tensors, arrays())


def test_error_is_one_line(tmp_path):
    done = convert(write_folder(tmp_path / "head"), tmp_path / "head", "--format", "safetensors")
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path}/head: the folder is not empty; nothing was written\n"
