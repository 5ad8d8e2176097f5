"""The sbatch file of a run: what is asked of the cluster, what is refused beforehand, and its submission."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pkm.config.load import dump
from pkm.errors import UserError, UserErrors
from pkm.slurm import launch as slurm
from tests.support.fake_slurm import REPOSITORY, Cluster
from tests.support.tiny import tiny_config


@pytest.mark.parametrize(
    ("time", "minutes"),
    [("90", 90), ("90:30", 90.5), ("24:00:00", 1440), ("1:30:30", 90.5), ("2-0", 2880), ("1-12:30", 2190),
     ("1-0:0:30", 1440.5), (" 7 ", 7)],
)  # fmt: skip
def test_times_are_read_as_sbatch_reads_them(time: str, minutes: float) -> None:
    assert slurm.minutes(time) == minutes


@pytest.mark.parametrize("time", ["", "x", "1h", "1:2:3:4", "-5", "1-", "UNLIMITED", "1.5"])
def test_what_is_no_time_is_refused(time: str) -> None:
    with pytest.raises(UserError, match="is not a time"):
        slurm.minutes(time)


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's config in a folder of its own, which is also where one works."""
    folder = tmp_path / "at work 100%"
    folder.mkdir()
    (folder / "corpus").mkdir()
    (folder / "corpus" / "manifest.json").write_text('{"vocab_size": 15}')
    config = tiny_config(name="a/b", corpus={"path": "corpus"}, device="auto")
    (folder / "c.yaml").write_text(dump(config))
    monkeypatch.chdir(folder)
    return folder / "c.yaml"


def launch(config_file: Path, *overrides: str, dry_run: bool = True, **settings: object) -> str:
    job = slurm.Job(**{"nodes": 2, "gpus_per_node": 2, "time": "24:00:00"} | settings)  # type: ignore[arg-type]
    return "\n".join(slurm.launch(job, config_file.name, list(overrides), dry_run))


class TestLaunch:
    def test_every_option_that_the_file_says_is_refused_besides(self, config_file: Path) -> None:
        whole = {"partition": "p", "account": "a", "qos": "q", "constraint": "c", "mem": "1G"}
        text = launch(config_file, **whole)
        said = {line.split()[1].split("=")[0] for line in text.splitlines() if line.startswith("#SBATCH ")}
        assert said - {"--requeue"} == set(slurm.OF_THE_FILE) - {"--array", "--no-requeue"}

    def test_a_dry_run_prints_the_file_and_leaves_nothing(self, config_file: Path) -> None:
        before = sorted(config_file.parent.rglob("*"))
        text = launch(
            config_file, partition="gpu", qos="high", mem="500G", constraint="a100&ib", sbatch=("--exclusive",)
        )
        assert sorted(config_file.parent.rglob("*")) == before
        asked = {line.split()[1] for line in text.splitlines() if line.startswith("#SBATCH ")}
        assert asked >= {
            "--nodes=2", "--gpus-per-node=2", "--ntasks-per-node=1", "--cpus-per-task=16", "--time=24:00:00",
            "--job-name=a/b", "--partition=gpu", "--qos=high", "--mem=500G", "--constraint=a100&ib", "--exclusive",
            "--requeue", "--open-mode=append", "--signal=B:USR1@600",
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("settings", "overrides", "minutes"),
        [
            ({}, (), "1425"),
            ({"margin": 60.0}, (), "1380"),
            ({"time": "20"}, (), "15"),
            ({}, ("max_minutes=30",), "30"),
            ({}, ("max_minutes=3000",), "1425"),
        ],
    )
    def test_the_run_stops_by_itself_before_its_time_is_over(
        self, config_file: Path, settings: dict[str, object], overrides: tuple[str, ...], minutes: str
    ) -> None:
        # The last one wins.
        assert launch(config_file, *overrides, **settings).split()[-1] == f"max_minutes={minutes}"

    def test_the_signal_comes_after_the_run_should_have_stopped_and_leaves_time_to_save(
        self, config_file: Path
    ) -> None:
        for limit in ("5", "20", "24:00:00", "7-0"):
            job = slurm.Job(nodes=1, gpus_per_node=1, time=limit)
            stops = slurm.max_minutes(job, tiny_config()) * 60
            signalled = slurm.minutes(limit) * 60 - job.signal_seconds
            assert stops < signalled < slurm.minutes(limit) * 60 - 30

    @pytest.mark.parametrize("nodes", [1, 2])
    def test_the_file_it_writes_runs_as_a_job_wherever_it_is_started(
        self, config_file: Path, cluster: Cluster, nodes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        venv = cluster.folder / "venv of 'mine'"
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "activate").write_text('activated="yes, $loaded"\nexport activated\n')
        monkeypatch.setenv("PATH", f"{cluster.folder}/bin:/usr/bin:/bin")
        monkeypatch.setenv("FAKE", str(cluster.folder))
        shown = launch(
            config_file, "optim.steps=9", dry_run=False, nodes=nodes, venv=venv, setup=("loaded='a module'",)
        )
        path = Path("runs/a/b/slurm/launch.sbatch")
        assert "submitted job 4711" in shown and "slurm/4711.log" in shown
        assert cluster.said("sbatch") == [f"--parsable {path}"]
        cluster.settings = {"FAKE_TRAIN": "pwd >$FAKE/where; status stopped 'time limit'", "FAKE_RUN": "runs/a/b"}
        process = cluster.start("bash", path.absolute(), nodes=nodes, cwd=cluster.folder)
        output, _ = process.communicate(timeout=60)
        assert (process.returncode, cluster.requeues()) == (0, 1), output
        assert (cluster.folder / "where").read_text().strip() == str(config_file.parent)
        train = [line for line in cluster.said("python") if "train.py" in line]
        assert len(train) == nodes
        assert (
            train[0].endswith("/train.py c.yaml optim.steps=9 max_minutes=1425") and "--nproc-per-node=2 " in train[0]
        )
        environment = (cluster.folder / "environment").read_text().splitlines()
        assert {"activated=yes, a module", "OMP_NUM_THREADS=1"} <= set(environment)
        assert sum("doctor.py" in line for line in cluster.said("python")) == nodes

    def test_the_log_goes_to_the_runs_directory_whatever_its_path(self, config_file: Path) -> None:
        line = next(line for line in launch(config_file).splitlines() if "--output" in line)
        folder = str(config_file.parent).replace("%", "%%")
        assert line == f'#SBATCH --output="{folder}/runs/a/b/slurm/%j.log"'

    def test_a_batch_that_the_ranks_cannot_share_is_refused_with_its_line(self, config_file: Path) -> None:
        with pytest.raises(UserErrors, match=r"c.yaml:\d+: optim.batch_tokens.*which 6 ranks cannot share evenly"):
            launch(config_file, nodes=3)

    def test_every_mistake_in_what_is_asked_is_named_at_once(self, config_file: Path, tmp_path: Path) -> None:
        with pytest.raises(UserErrors) as caught:
            launch(
                config_file, "device=cpu", nodes=0, time="soon", partition="a b", venv=tmp_path, cpus_per_task=0,
                sbatch=("reservation",), setup=("a\nb",), gpus_per_node=-1,
            )  # fmt: skip
        places = [error.where for error in caught.value.errors]
        assert places[:4] == ["--nodes", "--gpus-per-node", "--cpus-per-task", "--time"]
        assert {"--partition", "--sbatch", "--setup", "--venv", "argument 'device=cpu'"} <= set(places)

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"time": "2"}, "2 minutes are over before a run has begun: at least 5 minutes are needed"),
            ({"margin": 2000.0}, "do not fit into 1440"),
            ({"margin": 0.0}, "do not fit into 1440"),
            ({"gpus_per_node": 0, "nodes": 2}, "no GPU is asked for"),
            ({"sbatch": ("--time=5",)}, r"contradict the file's own --time(.|\n)*give --time itself"),
            ({"sbatch": ("--signal=B:TERM@9",)}, "contradict the file's own --signal"),
        ],
    )
    def test_what_cannot_work_is_refused(self, config_file: Path, settings: dict[str, object], words: str) -> None:
        with pytest.raises(UserErrors, match=words):
            launch(config_file, "device=cuda", **settings)

    def test_a_mistake_in_the_config_is_refused(self, config_file: Path) -> None:
        with pytest.raises(UserErrors, match=r"optim\.step"):
            launch(config_file, "optim.step=3")

    def test_settings_that_the_run_did_not_begin_with_are_refused(self, config_file: Path) -> None:
        folder = config_file.parent / "runs/a/b"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(config_file.read_text())
        launch(config_file, "max_minutes=30")
        with pytest.raises(UserError, match="seed: 1 -> 2"):
            launch(config_file, "seed=2")

    def test_a_run_that_is_finished_is_not_submitted_again_unless_it_is_made_longer(self, config_file: Path) -> None:
        folder = config_file.parent / "runs/a/b"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(config_file.read_text())
        (folder / "status.json").write_text('{"state": "finished", "step": 20}')
        with pytest.raises(UserError, match="all 20 steps are done"):
            launch(config_file)
        launch(config_file, "optim.steps=30")

    def test_a_run_that_is_at_work_is_said(self, config_file: Path) -> None:
        folder = config_file.parent / "runs/a/b"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(config_file.read_text())
        (folder / "status.json").write_text('{"state": "running", "step": 0, "host": "n7", "time": "noon"}')
        assert "note: the run was at work on n7 at noon" in launch(config_file)

    def test_the_folder_of_a_log_of_ones_own_is_made(
        self, config_file: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", f"{cluster.folder}/bin:/usr/bin:/bin")
        monkeypatch.setenv("FAKE", str(cluster.folder))
        assert "log: logs/today/4711.txt" in launch(config_file, dry_run=False, output="logs/today/%j.txt")
        assert Path("logs/today").is_dir()

    def test_a_corpus_that_is_not_there_yet_is_said(self, config_file: Path) -> None:
        assert "note: there is no prepared corpus at later" in launch(config_file, "corpus.path=later")

    def test_what_sbatch_says_against_it_is_shown(
        self, config_file: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", f"{cluster.folder}/bin:/usr/bin:/bin")
        monkeypatch.setenv("FAKE", str(cluster.folder))
        monkeypatch.setenv("FAKE_REFUSAL", "sbatch: error: invalid partition")
        with pytest.raises(UserError, match=r"launch\.sbatch: sbatch refused it: sbatch: error: invalid partition"):
            launch(config_file, dry_run=False)

    def test_without_sbatch_it_says_where_the_file_is(self, config_file: Path) -> None:
        done = subprocess.run(
            [sys.executable, REPOSITORY / "scripts/launch_slurm.py", "c.yaml", "--gpus-per-node", "2"],
            capture_output=True, text=True, env={"PATH": "/nowhere", "PYTHONPATH": str(REPOSITORY)},
        )  # fmt: skip
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert "no sbatch on this machine" in done.stderr and "runs/a/b/slurm/launch.sbatch" in done.stderr
        assert "pkm.slurm.turn" in Path("runs/a/b/slurm/launch.sbatch").read_text()
