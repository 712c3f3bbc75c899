"""Files at URLs, by Arrow's file systems or fsspec's; needs the extra parquet."""

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from jaxspec.errors import one_line


def open_url(url: str) -> pa.NativeFile:
    """Opens a file.

    Raises:
      OSError: it cannot be opened; the message is one line.
    """
    with _place(url) as (system, path):
        return system.open_input_file(path)


def files_at(url: str) -> list[str]:
    """The files in a folder, by name, or the URL itself if it is not one; errors as of `open_url`."""
    with _place(url) as (system, path):
        if system.get_file_info(path).type != fs.FileType.Directory:
            return [url]
        inside = system.get_file_info(fs.FileSelector(path, recursive=True))
    folder = urlsplit(url)
    names = sorted(each.path.removeprefix(path).strip("/") for each in inside if each.is_file)
    return [folder._replace(path=f"{folder.path.rstrip('/')}/{name}").geturl() for name in names]


@contextmanager
def _place(url: str) -> Iterator[tuple[fs.FileSystem, str]]:
    try:
        try:
            place = fs.FileSystem.from_uri(url)
        except pa.ArrowInvalid:  # a scheme that Arrow does not know
            place = fs.FileSystem.from_uri(f"fsspec+{url}")
        yield place
    except Exception as error:  # of any kind, as there are many file systems
        raise OSError(one_line(str(error))) from None
