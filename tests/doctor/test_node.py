"""What the doctor says of machines that are fit, and of those that are not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from pkm.config.schema import Config
from pkm.doctor import node, self_test
from pkm.doctor.finding import Finding, guarded, table

REPOSITORY = Path(__file__).parents[2]


def config(tmp_path: Path, **settings: object) -> Config:
    optim = {"steps": 5, "batch_tokens": 256}
    given = {"name": "a", "runs": tmp_path / "runs", "corpus": {"path": tmp_path / "corpus"}, "optim": optim}
    return Config.model_validate(given | settings)


def by_name(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.about: finding for finding in findings}


class TestPackages:
    def test_a_missing_package_fails_with_the_command_that_installs_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(node, "version_of", lambda package, module: None if package == "torch" else "9.9")
        found = by_name(node.needed_packages())
        assert found.pop("torch") == Finding("torch", "fail", "not installed", "pip install torch")
        assert {finding.status for finding in found.values()} == {"ok"}

    @pytest.mark.parametrize(
        ("version", "status"), [("2.9.1", "fail"), ("2.11.0+cu128", "ok"), ("2.13.0", "ok"), ("3.0", "ok")]
    )
    def test_versions_are_compared_as_numbers(self, monkeypatch: pytest.MonkeyPatch, version: str, status: str) -> None:
        monkeypatch.setattr(node, "version_of", lambda package, module: version)
        assert by_name(node.needed_packages())["torch"].status == status

    def test_an_optional_package_that_is_not_there_is_no_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(node, "version_of", lambda package, module: None)
        assert {finding.status for finding in node.optional_packages()} == {"note"}

    def test_the_needed_packages_are_those_of_setup_py(self) -> None:
        asked = (REPOSITORY / "setup.py").read_text().split("install_requires=[")[1].split("]")[0]
        assert set(re.findall(r'"([\w-]+)', asked)) == set(node.NEEDED)


class TestApex:
    """PyPI's apex is a web toolkit; only NVIDIA's has fused optimizers."""

    @pytest.fixture
    def package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.syspath_prepend(str(tmp_path))
        folder = tmp_path / "apex"
        folder.mkdir()
        # Must be found out without importing it: the toolkit's own imports fail where its dependencies are missing.
        (folder / "__init__.py").write_text("raise ImportError('pyramid')")
        return folder

    def test_the_web_toolkit_is_not_taken_for_the_real_one(self, package: Path) -> None:
        found = node.apex()
        assert found.status == "note" and "web toolkit" in found.found

    def test_the_real_one_without_its_extensions_is_told_apart(self, package: Path) -> None:
        (package / "optimizers").mkdir()
        (package / "optimizers/fused_adam.py").touch()
        found = node.apex()
        assert found.status == "note" and "without its CUDA extensions" in found.found

    def test_the_real_one_is_recognised(self, package: Path) -> None:
        (package / "optimizers").mkdir()
        (package / "optimizers/fused_adam.py").touch()
        (package.parent / "amp_C.py").touch()
        assert node.apex() == Finding("apex", "ok", "NVIDIA's, with its CUDA extensions")


class TestDisk:
    def test_free_space_and_speed_are_measured_where_runs_will_be_made(self, tmp_path: Path) -> None:
        (found,) = node.disk(tmp_path / "not/yet/there")
        assert found.status in ("ok", "note") and f"free at {tmp_path}," in found.found and "/s written" in found.found
        assert list(tmp_path.iterdir()) == []

    def test_a_file_where_runs_should_go_fails(self, tmp_path: Path) -> None:
        (tmp_path / "runs").touch()
        (found,) = node.disk(tmp_path / "runs")
        assert (found.status, found.found) == ("fail", f"{tmp_path}/runs is a file")

    def test_a_directory_that_cannot_be_written_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(**_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
        (found,) = node.disk(tmp_path)
        assert (found.status, found.found) == ("fail", f"cannot write to {tmp_path}: Permission denied")

    def test_a_full_disk_fails_before_anything_is_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(1 << 20))
        (found,) = node.disk(tmp_path)
        assert found.status == "fail" and found.found.startswith("1.0 MiB free")


def memory_of(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(node, "_free_memory", lambda: free)


class TestNeedsOfARun:
    def test_a_corpus_that_is_not_prepared_fails(self, tmp_path: Path) -> None:
        (found,) = node.corpus(config(tmp_path))
        assert found.status == "fail" and f"{tmp_path}/corpus: there is no such directory" in found.found
        assert "scripts/prepare.py" in found.advice

    def test_a_prepared_corpus_is_opened(self, tmp_path: Path, tiny_corpus_path: Path) -> None:
        (found,) = node.corpus(config(tmp_path, corpus={"path": tiny_corpus_path, "context": 8}))
        assert found == Finding("corpus", "ok", f"{tiny_corpus_path}, 2,400 tokens to train on, vocabulary 50")

    def test_a_corpus_without_one_window_of_text_fails(self, tmp_path: Path, tiny_corpus_path: Path) -> None:
        settings = {"corpus": {"path": tiny_corpus_path, "context": 2400}, "optim": {"steps": 1, "batch_tokens": 2400}}
        (found,) = node.corpus(config(tmp_path, **settings))
        assert found.status == "fail" and "prepare more text" in found.advice

    def test_a_device_that_is_not_there_fails(self, tmp_path: Path) -> None:
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
        (found,) = node.device_of(config(tmp_path, device="cuda"))
        assert found.status == "fail" and found.advice == "choose auto or one of: cpu"

    def test_a_precision_that_the_device_lacks_fails(self, tmp_path: Path) -> None:
        (found,) = node.device_of(config(tmp_path, device="cpu", precision="fp16"))
        assert found.status == "fail" and "fp16 needs a GPU" in found.found

    # 151 M parameters without the embeddings: 12 bytes each for weight and moments, 4 for the gradient.
    @pytest.mark.parametrize(("free", "status"), [(1 << 30, "fail"), (2 << 30, "note"), (1 << 40, "ok")])
    def test_memory_fails_where_weights_do_not_fit_and_warns_where_activations_may_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, status: str
    ) -> None:
        memory_of(monkeypatch, free)
        found = by_name(node.device_of(config(tmp_path, device="cpu")))["memory"]
        assert found.status == status, found

    def test_ranks_of_a_machine_share_its_memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        memory_of(monkeypatch, 10 << 30)
        assert by_name(node.device_of(config(tmp_path, device="cpu")))["memory"].status == "ok"
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
        assert by_name(node.device_of(config(tmp_path, device="cpu"), ranks=8))["memory"].status == "fail"

    def test_sharded_values_need_less_memory_of_each_rank(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory_of(monkeypatch, 4 << 30)
        memory = {"layers": [6], "sub_keys": 512}
        large = config(tmp_path, device="cpu", memory=memory, parallel={"values": "sharded"})
        found = [by_name(node.device_of(large, ranks))["memory"].status for ranks in (1, 8)]
        assert found == ["fail", "ok"]

    def test_checkpoints_that_do_not_fit_fail(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # 12 bytes for each of 150 M parameters and more, five times: three kept, the best, one in the making.
        monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(8 << 30))
        (found,) = node.room(config(tmp_path))
        assert found.status == "fail" and "8.0 GiB free" in found.found and "checkpoint.keep" in found.advice

    def test_checkpoints_that_are_there_already_need_no_more_room(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(8 << 30))
        written = tmp_path / "runs/a/checkpoints/step-0000001"
        written.mkdir(parents=True)
        with open(written / "rank-00000.safetensors", "wb") as file:
            file.truncate(4 << 30)
        assert next(node.room(config(tmp_path))).status == "ok"


class TestSelfTest:
    def test_a_model_with_a_memory_learns_on_this_machine(self) -> None:
        (found,) = self_test.self_test()
        assert found.status in ("ok", "note"), found
        assert "loss" in found.found

    def test_training_that_does_not_learn_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from pkm.train.optim import Optimizers

        monkeypatch.setattr(Optimizers, "step", lambda *args: None)
        monkeypatch.setattr(self_test, "STEPS", 5)
        monkeypatch.setattr(self_test, "ENOUGH_STEPS", 5)
        (found,) = self_test.self_test()
        assert found.status == "fail"

    def test_a_loss_that_is_not_finite_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self_test, "_train", lambda config, deadline: ([5.0, float("nan")], "cpu"))
        (found,) = self_test.self_test()
        assert found.status == "fail"

    def test_whatever_breaks_is_a_finding_and_not_a_traceback(self) -> None:
        def broken() -> Iterator[Finding]:
            yield Finding("one", "ok", "fine")
            raise OSError("libcuda.so.1: cannot open shared object file")

        one, two = guarded("two", broken)
        assert one.status == "ok" and two.status == "fail" and "libcuda.so.1" in two.found


class TestScript:
    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, REPOSITORY / "scripts/doctor.py", *arguments],
            capture_output=True, text=True, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )  # fmt: skip

    def test_findings_as_json_and_exit_status_1_for_a_run_that_cannot_start(self, tmp_path: Path) -> None:
        file = tmp_path / "c.yaml"
        file.write_text(
            f"name: a\nruns: {tmp_path}\ncorpus: {{path: {tmp_path}/no}}\noptim: {{steps: 1, batch_tokens: 256}}\n"
        )
        done = self.run(str(file), "--json")
        assert done.returncode == 1, done.stderr
        found = {finding["about"]: finding for finding in json.loads(done.stdout)}
        assert {"python", "torch", "apex", "cpu", "disk", "corpus", "self-test"} <= set(found)
        assert [about for about, finding in found.items() if finding["status"] == "fail"] == ["corpus"]

    def test_a_mistake_in_the_config_is_exit_status_2(self, tmp_path: Path) -> None:
        (tmp_path / "c.yaml").write_text("nam: a\n")
        done = self.run(str(tmp_path / "c.yaml"))
        assert done.returncode == 2 and "did you mean name?" in done.stderr and "Traceback" not in done.stderr


def test_the_table_shows_every_finding_with_its_advice() -> None:
    from rich.console import Console

    console = Console(width=120)
    with console.capture() as capture:
        console.print(table([Finding("disk", "fail", "no [space]", "free some")]))
    assert " ".join(capture.get().split()) == "FAIL disk no [space]; free some"
