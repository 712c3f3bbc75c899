import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jaxspec_kernels.calls.ffi_layout import UnknownLayoutError, api_version, word_of

HEADER = """
#define XLA_FFI_API_MAJOR 0
#define XLA_FFI_API_MINOR 7
typedef struct XLA_FFI_Base {
  size_t struct_size;
  XLA_FFI_Type type;  // an enumeration
  struct XLA_FFI_Base* next;
} XLA_FFI_Base;

struct XLA_FFI_Version {
  size_t struct_size;
  int major_version;  // out
  int minor_version;
};

struct XLA_FFI_Api {
  const XLA_FFI_Internal* internal;
  // A comment; with a semicolon.
  XLA_FFI_Version version;
  int64_t rank;

  _XLA_FFI_API_STRUCT_FIELD(XLA_FFI_Error_Create);
  _XLA_FFI_API_STRUCT_FIELD(XLA_FFI_Error_Destroy);
};
"""


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("XLA_FFI_Base.struct_size", 0),
        ("XLA_FFI_Base.type", 1),
        ("XLA_FFI_Base.next", 2),
        ("XLA_FFI_Api.internal", 0),
        ("XLA_FFI_Api.version", 1),
        ("XLA_FFI_Api.version.major_version", 2),
        ("XLA_FFI_Api.rank", 3),
        ("XLA_FFI_Api.XLA_FFI_Error_Create", 4),
        ("XLA_FFI_Api.XLA_FFI_Error_Destroy", 5),
    ],
)
def test_words_are_where_c_puts_them(path, word):
    assert word_of(HEADER, *path.split(".")) == word


def test_the_layout_follows_the_header():
    longer = HEADER.replace("  int64_t rank;\n", "  int64_t rank;\n  void* data;\n")
    assert word_of(longer, "XLA_FFI_Api", "XLA_FFI_Error_Create") == 5


def test_the_version_is_one_word():
    assert api_version(HEADER) == 7 << 32


@pytest.mark.parametrize(
    "path", ["XLA_FFI_Frame.api", "XLA_FFI_Api.data", "XLA_FFI_Api.rank.data", "XLA_FFI_Api.version.patch"]
)
def test_what_the_header_does_not_declare_is_named(path):
    with pytest.raises(UnknownLayoutError, match=f"no {path}"):
        word_of(HEADER, *path.split("."))


def test_a_member_inside_a_word_is_refused():
    with pytest.raises(UnknownLayoutError, match=r"XLA_FFI_Version\.minor_version is not a word"):
        word_of(HEADER, "XLA_FFI_Version", "minor_version")


def test_no_version_is_refused():
    with pytest.raises(UnknownLayoutError, match="no version"):
        api_version("struct XLA_FFI_Api {\n};\n")


@pytest.mark.skipif(jax.default_backend() != "cpu" or jax.device_count() > 1, reason="runs on one CPU device")
def test_a_jaxlib_whose_layout_is_unknown_leaves_the_work_to_xla(tmp_path):
    folder = Path("xla", "ffi", "api")
    text = Path(jax.ffi.include_dir(), folder, "c_api.h").read_text("utf-8")
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "c_api.h").write_text(
        text.replace("XLA_FFI_ThreadPool_Schedule)", "Other)"), "utf-8"
    )
    code = (
        "import jax\n"
        f"jax.ffi.include_dir = lambda: {str(tmp_path)!r}\n"
        "from jaxspec_kernels.matmul import matmul, reference\n"
        "print(matmul.why_not('numba'))\n"
        "assert matmul.select(None) is reference\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("does not know the foreign function interface of jaxlib")
    assert "its header has no XLA_FFI_Api.XLA_FFI_ThreadPool_Schedule" in told.stdout
