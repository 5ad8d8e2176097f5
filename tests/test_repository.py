"""What holds for the repository as a whole: imports go one way, scripts answer, nothing of one machine is in it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parent.parent

# The package from the bottom up: a folder, or a file beside them, imports only from what stands above it here.
ORDER = """
    format errors files machine config distributed device text corpus checkpoint memory model run prepare inference
    evaluation train experiments report slurm doctor
""".split()  # noqa: SIM905

PACKAGE = sorted((REPOSITORY / "pkm").rglob("*.py"))


def module_of(path: Path) -> str:
    """`pkm/memory/keys.py` -> `memory.keys`; a package's own file -> its name, the root's -> the empty string."""
    return ".".join(path.relative_to(REPOSITORY / "pkm").with_suffix("").parts).removesuffix("__init__").rstrip(".")


def place_of(module: str) -> str:
    """`memory.keys` -> `memory`: what ORDER lists."""
    return module.split(".")[0]


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module of pkm) of every import in a file, those inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write `from pkm...` instead of a relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            # `from pkm.corpus import store` imports a file, `from pkm.corpus.store import Corpus` a name out of one.
            names = [name if is_module(name) else str(node.module) for name in inner]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "pkm":
                yield node.lineno, name.removeprefix("pkm").lstrip(".")


def is_module(name: str) -> bool:
    path = REPOSITORY / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


class TestImports:
    def test_every_folder_has_its_place_in_the_order(self) -> None:
        assert {place_of(module_of(path)) for path in PACKAGE} - {""} == set(ORDER)
        assert len(ORDER) == len(set(ORDER))

    @pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(REPOSITORY)))
    def test_a_file_imports_only_from_its_own_folder_and_those_above_it(self, path: Path) -> None:
        place = place_of(module_of(path))
        # The package's own file hands out what others hold.
        seen = ORDER[: ORDER.index(place) + 1] if place else ORDER
        wrong = {
            f"{path.relative_to(REPOSITORY)}:{line}: imports pkm.{name}, which is not above it in ORDER"
            for line, name in imported(path)
            if name and place_of(name) not in seen
        }
        assert not wrong, "\n".join(sorted(wrong))

    def test_no_files_import_each_other_in_a_circle(self) -> None:
        TopologicalSorter({module_of(path): {name for _, name in imported(path)} for path in PACKAGE}).prepare()

    def test_configs_are_read_and_counted_without_torch(self) -> None:
        program = "import sys, pkm.config.load, pkm.config.schema, pkm.model.cost; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY).returncode == 0


PROGRAMS = [*sorted((REPOSITORY / "scripts").glob("*.py")), REPOSITORY / "train.py"]

# Runs a program with --help in a fresh interpreter; status 3 if that alone brought in torch, which takes seconds.
HELP = """
import runpy, sys
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    sys.exit(end.code or 3 * ("torch" in sys.modules))
"""


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_a_program_says_how_it_is_used_without_loading_torch(program: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", HELP, program], capture_output=True, text=True, cwd=REPOSITORY, env=environment
    )
    assert done.returncode != 3, "import torch inside main, after the arguments are parsed"
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_a_program_that_takes_several_words_takes_them_before_and_after_its_options(program: Path) -> None:
    text = program.read_text(encoding="utf-8")
    several = re.search(r'"\w+",\s+nargs="[*+]"', text)  # positional, not an option's
    assert not several or ".parse_intermixed_args()" in text


def tracked() -> list[Path]:
    """Every file under version control that is still there."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout, or no git")
    return [path for name in listed.stdout.split("\0") if name and (path := REPOSITORY / name).is_file()]


class TestTrackedFiles:
    def test_none_is_larger_than_a_mebibyte(self) -> None:
        large = [
            f"{path.relative_to(REPOSITORY)}: {path.stat().st_size:,}"
            for path in tracked()
            if path.stat().st_size > 1 << 20
        ]
        assert not large

    def test_none_names_a_package_registry_or_a_path_of_one_machine(self) -> None:
        # Taken apart, so that this file does not name them either.
        hosts = [
            "pypi" r"\.org",
            "python" r"hosted\.org",
            "npm" r"js\.(org|com)",
            "crates" r"\.io",
            "anaconda" r"\.org",
        ]
        folders = ["work", "root", "home", "Users", "tmp"]
        sign = re.compile("|".join([*hosts, rf"(?<![\w.~}}\])])/({'|'.join(folders)})/\w"]))
        named = []
        for path in tracked():
            try:
                lines = path.read_text(encoding="utf-8").splitlines()
            except UnicodeDecodeError:
                continue
            named += [
                f"{path.relative_to(REPOSITORY)}:{n}: {line.strip()[:100]}"
                for n, line in enumerate(lines, 1)
                if sign.search(line)
            ]
        assert not named, "\n".join(named)

    def test_every_yaml_file_parses(self) -> None:
        files = [path for path in tracked() if path.suffix in (".yaml", ".yml")]
        assert len(files) > 15
        for path in files:
            yaml.safe_load(path.read_text(encoding="utf-8"))

    def test_every_description_of_a_corpus_is_valid(self) -> None:
        from pkm.config.load import load
        from pkm.prepare.settings import PrepareConfig

        for path in (REPOSITORY / "data").glob("*.yaml"):
            load(path, (), PrepareConfig)

    def test_the_licence_is_mit(self) -> None:
        assert (REPOSITORY / "LICENSE").read_text().startswith("MIT License\n")
