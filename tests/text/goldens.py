"""Golden samples of the text tests, unpacked once."""

import tarfile
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"
SHARED = Path(__file__).parents[3] / "shared" / "golden"


@cache
def golden(archive: str) -> dict[str, str]:
    """Files of an archive by name."""
    with tarfile.open(FOLDER / f"{archive}.tar.xz") as tar:
        return {member.name: tar.extractfile(member).read().decode() for member in tar.getmembers()}
