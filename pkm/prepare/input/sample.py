"""The sample corpus: 300 news articles that anyone can fetch (Lee background corpus, ABC news mail service, 2000-2002).

It comes out of the gensim wheel, which is downloaded as a file and not installed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pkm.errors import UserError
from pkm.files import atomic_write, explained, sha256

WHEEL = "gensim==4.4.0"
INSIDE = "gensim/test/test_data/lee_background.cor"
SHA256 = "5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb"
ARTICLES = 300
PATH = Path("data/raw/lee_background.cor")
OWN_TEXT = (
    "try again when the package index can be reached; or prepare your own text: copy data/sample.yaml, remove `download:` "
    "and let `sources` point at your files (data/README.md), then run scripts/prepare.py with the copy"
)


def fetch(path: Path = PATH) -> Path:
    """The corpus file, one article a line; downloaded unless it is there and intact.

    UserError where it cannot be fetched, or is not what it should be.
    """
    if path.exists() and sha256(path) == SHA256:
        return path
    with tempfile.TemporaryDirectory() as directory:
        content = _out_of_wheel(_download(Path(directory)))
    atomic_write(path, content)
    if sha256(path) != SHA256:
        path.unlink()
        raise UserError(f"the sample corpus inside {WHEEL} is not the one this version of pkm knows", fix=OWN_TEXT)
    return path


def _download(directory: Path) -> Path:
    """The wheel for this interpreter, or else one that is known to exist: only a text file in it is wanted."""
    known = ["--platform=manylinux_2_28_x86_64", "--python-version=3.11", "--implementation=cp", "--abi=cp311"]
    reason = ""
    for options in ([], known):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", *options]
        command += ["--disable-pip-version-check", "--dest", str(directory), WHEEL]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise UserError(f"pip could not be started to fetch the sample corpus: {error}", fix=OWN_TEXT) from error
        if done.returncode == 0 and (wheels := sorted(directory.glob("*.whl"))):
            return wheels[0]
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR") or "No module named" in line]
        reason = reason or (errors[0] if errors else "pip gave no reason")
    raise UserError(f"the sample corpus could not be fetched ({reason})", f"pip download {WHEEL}", OWN_TEXT)


def _out_of_wheel(wheel: Path) -> bytes:
    try:
        with explained(wheel), zipfile.ZipFile(wheel) as archive:
            return archive.read(INSIDE)
    except (KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{wheel.name} holds no {INSIDE}: {error}", fix=OWN_TEXT) from error
