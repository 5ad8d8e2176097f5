"""What the doctor says of ranks together: real ones, forked and joined over gloo, and what it makes of measurements."""

from __future__ import annotations

import ctypes
import io
import json
import os
import pickle
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as td

from pkm.config.load import dump
from pkm.config.schema import load
from pkm.doctor import network, self_test, shared_files
from pkm.doctor import ranks as ranks_doctor
from pkm.doctor.finding import Finding
from pkm.doctor.gather import Found, named
from pkm.errors import UserError
from tests.support.fork import exit_code_of
from tests.support.tiny import random_corpus, tiny_config

REPOSITORY = Path(__file__).parents[2]


def on_ranks(folder: Path, ranks: int, action: Callable[[int], Any]) -> list[Any]:
    """What `action(rank)` returns on each of so many forked processes, set up as torchrun would."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def rank_main(rank: int) -> None:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        result = action(rank)
        (folder / f"result-{rank}").write_bytes(pickle.dumps(result))

    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os._exit(exit_code_of(lambda: rank_main(rank)))  # noqa: B023  # forked at once
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * ranks
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(ranks)]


@pytest.fixture
def config_file(tmp_path: Path, tiny_corpus_path: Path) -> Path:
    config = tiny_config(runs=tmp_path / "runs", corpus={"path": tiny_corpus_path})
    (tmp_path / "c.yaml").write_text(dump(config))
    return tmp_path / "c.yaml"


def examined(
    config_file: Path,
    overrides: Callable[[int], list[str]] = lambda rank: [],
    ranks: int = 2,
    before: Callable[[int], None] = lambda rank: None,
    own: Callable[[int], list[Finding]] = lambda rank: [],
) -> dict[str, Finding]:
    """Findings of `ranks` ranks, by name, checked to be judged alike by all; their own checks are replaced by `own`."""

    def examine(rank: int) -> dict[str, Finding]:
        ranks_doctor.by_itself = lambda config: iter(own(rank))  # type: ignore[assignment]
        shared_files.VISIBLE_SECONDS = 0.5
        before(rank)
        try:
            resolved: Any = load(config_file, overrides(rank))
        except UserError as error:
            resolved = error
        return {finding.about: finding for finding in ranks_doctor.examine(resolved)}

    found = on_ranks(config_file.parent, ranks, examine)
    shared = found[0].keys() & found[-1].keys()
    assert {"config", "gloo", "shared files"} <= shared
    assert all(one[about].status == found[0][about].status for one in found for about in shared)
    return found[0]


def failures(found: dict[str, Finding]) -> set[str]:
    return {about for about, finding in found.items() if finding.status == "fail"}


def doctor_on_ranks(config_file: Path, arguments: Callable[[int], list[str]]) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of scripts/doctor.py on each of two ranks, with next to no self-test."""

    def program(rank: int) -> tuple[int, str, str]:
        self_test.SECONDS = 0.1
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        sys.argv = ["doctor.py", str(config_file), *arguments(rank)]
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(REPOSITORY / "scripts/doctor.py"), run_name="__main__")
        return int(str(end.value.code)), sys.stdout.getvalue(), sys.stderr.getvalue()

    return on_ranks(config_file.parent, 2, program)


class TestRealRanks:
    def test_ranks_that_fit_together_pass_every_check_and_leave_nothing_behind(self, config_file: Path) -> None:
        found = examined(config_file, own=lambda rank: [Finding("self-test", "ok", "learns")])
        assert failures(found) == set()
        assert list(found) == [
            "ranks", "software", "config", "precision", "same corpus", "batch", "self-test", "clocks", "gloo",
            "shared files", "parts", "locks",
        ]  # fmt: skip
        assert found["ranks"].found == f"2 on 1 node ({socket.gethostname()}: 0-1), cpu"
        assert found["locks"].found == "a lock that rank 0 holds keeps all other ranks out"
        assert sorted(path.name for path in config_file.parent.iterdir()) == ["c.yaml", "result-0", "result-1"]

    def test_a_rank_with_other_settings_another_precision_or_corpus_is_named(
        self, config_file: Path, tmp_path: Path
    ) -> None:
        other = random_corpus(tmp_path / "other", seed=5)
        found = examined(config_file, lambda rank: [f"corpus.path={other}", "precision=bf16"] if rank else [])
        assert failures(found) == {"config", "precision", "same corpus"}
        assert found["precision"].found == "precision fp32 on rank 0, bf16 on rank 1"

    def test_a_config_that_only_one_rank_cannot_read_fails_and_keeps_none_waiting(self, config_file: Path) -> None:
        found = examined(config_file, lambda rank: ["optim.step=3"] if rank == 1 else [])
        assert failures(found) == {"config", "precision", "same corpus"}
        assert found["config"].found.startswith("rank 1: ") and "optim.step" in found["config"].found

    def test_a_batch_that_the_ranks_cannot_share_fails_with_its_line(self, config_file: Path) -> None:
        found = examined(config_file, ranks=3)
        assert failures(found) == {"batch"}
        assert f"{config_file}:" in found["batch"].found and "3 ranks cannot share evenly" in found["batch"].found

    def test_a_directory_that_is_not_shared_is_found_out(self, config_file: Path) -> None:
        runs = config_file.parent / "runs"
        runs.mkdir()

        def hide(rank: int) -> None:
            """Give this process a file system of its own there, as a node without the shared one has."""
            if rank:
                libc = ctypes.CDLL(None, use_errno=True)
                assert libc.unshare(0x00020000) == 0
                for mount in (["--make-rprivate", "/"], ["-t", "tmpfs", "none", str(runs)]):
                    subprocess.run(["mount", *mount], check=True, capture_output=True)

        if exit_code_of(lambda: hide(1)) != 0:
            pytest.skip("hiding a directory from a process needs root")
        found = examined(config_file, before=hide)
        assert failures(found) == {"shared files"}
        assert found["shared files"].found == f"rank 1 does not see what rank 0 wrote below {runs}"
        assert list(runs.iterdir()) == []

    def test_a_directory_in_which_rank_0_may_not_write_fails_without_keeping_the_others(
        self, config_file: Path
    ) -> None:
        from tests.support.fork import without_root

        runs = config_file.parent / "runs"
        runs.mkdir(mode=0o555)
        found = examined(config_file, before=lambda rank: without_root())
        assert failures(found) == {"shared files"}
        assert found["shared files"].found.startswith("rank 0: ") and "no permission" in found["shared files"].found

    def test_a_clock_that_is_wrong_is_found_by_how_much(self, config_file: Path) -> None:
        def jump(rank: int) -> None:
            if rank:
                right = time.time
                time.time = lambda: right() + 400

        clocks = examined(config_file, before=jump)["clocks"]
        assert clocks.status == "fail"
        assert float(clocks.found.split(": ")[1].split()[0].replace(",", "")) == pytest.approx(400_000, abs=1000)

    def test_a_sum_that_comes_out_wrong_fails(self, config_file: Path) -> None:
        def break_sums(rank: int) -> None:
            if rank == 1:
                right = td.all_reduce

                def wrong(x: Any, *args: Any, **options: Any) -> None:
                    right(x, *args, **options)
                    x[-1] += 1

                td.all_reduce = wrong

        found = examined(config_file, before=break_sums)
        assert failures(found) == {"gloo"}
        assert found["gloo"].found.startswith("rank 1: cpu: 18 sums over all ranks came out wrong")

    def test_the_program_prints_once_and_ends_with_status_1_if_a_rank_is_not_fit(self, config_file: Path) -> None:
        (code, out, _), (other_code, other_out, _) = doctor_on_ranks(
            config_file, lambda rank: ["--json", f"seed={rank}"]
        )
        assert (code, other_code, other_out) == (1, 0, "")
        found = {one["about"]: one for one in json.loads(out)}
        assert {"python", "torch", "disk", "corpus", "room", "memory", "self-test", "gloo", "locks"} <= set(found)
        assert [about for about, one in found.items() if one["status"] == "fail"] == ["config"]

    def test_a_config_that_no_rank_can_read_is_said_once_with_exit_status_2(self, config_file: Path) -> None:
        (code, _, said), (other_code, _, other_said) = doctor_on_ranks(config_file, lambda rank: ["seeds=2"])
        assert code == 2 and "did you mean seed?" in said and "Traceback" not in said
        assert other_code == 0 and "seeds" not in other_said

    def test_ranks_that_cannot_reach_each_other_say_what_to_do(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def join(rank: int) -> str:
            from pkm.doctor import gather

            gather.PATIENCE_SECONDS = 1
            os.environ["WORLD_SIZE"] = "2"  # the other one never comes
            try:
                gather.join()
            except UserError as error:
                return str(error)
            return ""

        (said,) = on_ranks(tmp_path, 1, join)
        assert said.startswith("127.0.0.1:") and "cannot reach the others" in said and "GLOO_SOCKET_IFNAME" in said


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_sums_on_a_gpu_arrive_over_nccl() -> None:
    """One rank: all that one GPU allows. In a process of its own, since CUDA does not survive a fork."""
    program = (
        "from pkm.doctor import gather, network\n"
        "network.NCCL_SIZES = (1 << 10, 1 << 24)\n"
        "gather.join()\n"
        "print(network.nccl(None))"
    )
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, env=os.environ | environment
    )
    assert "status='ok'" in done.stdout and "16.0 MiB in" in done.stdout, done.stdout + done.stderr


class TestWhereRanksAre:
    def test_nodes_and_their_ranks_are_listed(self) -> None:
        places = [ranks_doctor.Place(f"n{rank // 2}", "A100", f"gpu-{rank}") for rank in range(4)]
        assert ranks_doctor.where_ranks_are(places) == Finding("ranks", "ok", "4 on 2 nodes (n0: 0-1; n1: 2-3), A100")

    def test_two_ranks_on_one_gpu_fail(self) -> None:
        places = [ranks_doctor.Place("n0", "A100", unit) for unit in ("a", "b", "b")]
        found = ranks_doctor.where_ranks_are(places)
        assert found.status == "fail" and "ranks 1-2 share a GPU" in found.found

    def test_gpus_of_one_number_on_two_nodes_are_two(self) -> None:
        assert ranks_doctor.where_ranks_are([ranks_doctor.Place(host, "A100", "0") for host in "ab"]).status == "ok"

    def test_different_gpus_and_unequal_nodes_are_noted(self) -> None:
        mixed = ranks_doctor.where_ranks_are(
            [ranks_doctor.Place("a", "A100", "x"), ranks_doctor.Place("b", "V100", "y")]
        )
        assert mixed.status == "note" and "A100 and V100" in mixed.found
        unequal = [ranks_doctor.Place("a", "cpu"), ranks_doctor.Place("a", "cpu"), ranks_doctor.Place("b", "cpu")]
        assert ranks_doctor.where_ranks_are(unequal).status == "note"


class TestJudging:
    def test_software_that_differs_fails_with_who_has_what(self) -> None:
        versions = [{"torch": "2.13", "nccl": "2.28"}] * 2 + [{"torch": "2.11"}]
        found = ranks_doctor.same("software", Found(versions, {}), "install")
        assert found.status == "fail"
        assert found.found == "torch 2.13 on rank 0-1, 2.11 on rank 2; nccl 2.28 on rank 0-1, none on rank 2"

    def test_a_rank_without_an_answer_fails_with_its_reason(self) -> None:
        found = ranks_doctor.same(
            "corpus", Found([{}], {1: "no such directory", 2: "no such directory", 3: "damaged"}), ""
        )
        assert found == Finding("corpus", "fail", "rank 1-2: no such directory; rank 3: damaged")

    def test_of_what_ranks_find_alone_the_worst_is_shown_with_who_found_it(self) -> None:
        fit, unfit = Finding("cuda:0", "ok", "79 GiB free"), Finding("cuda:0", "note", "3 GiB free", "see nvidia-smi")
        disk = Finding("disk", "ok", "plenty")
        merged = list(ranks_doctor.merged([[disk, fit], [fit], [disk, unfit], [unfit]], ["a", "a", "b", "b"]))
        assert merged == [disk, Finding("cuda:0", "note", "rank 2-3 on b: 3 GiB free", "see nvidia-smi")]
        assert list(ranks_doctor.merged([[disk, fit], [fit]], ["a", "a"])) == [disk, fit]

    @pytest.mark.parametrize(("ahead", "status"), [(0.2, "ok"), (-5.0, "note"), (-301.0, "fail")])
    def test_clocks_are_judged_by_the_farthest(self, ahead: float, status: str) -> None:
        found = network.farthest({1: 0.1, 2: ahead, 3: -0.05})
        assert (
            found.status == status and f"rank 2 is the farthest from rank 0's: {ahead * 1000:+,.1f} ms" in found.found
        )

    def test_bandwidth_is_what_a_link_carries_at_the_slowest_rank(self) -> None:
        # A ring of 4 sends 2 * 3/4 of the bytes over each link: 0.75 GB in 0.1 s.
        found = network.speed("nccl", [{500_000_000: 0.05}] * 3 + [{500_000_000: 0.1}], None)
        assert "(7.50 GB/s)" in found.found and found.status == "ok"

    def test_gpus_that_talk_over_a_slow_network_are_noted(self) -> None:
        assert network.speed("nccl", [{500_000_000: 0.5}] * 4, None).status == "note"
        assert network.speed("gloo", [{500_000_000: 0.5}] * 4, None).status == "ok"

    @pytest.mark.parametrize(
        ("first", "others", "status", "words"),
        [
            (True, [False, False, False], "ok", "keeps all other ranks out"),
            (True, [False, False, True], "note", "rank 2 gets the lock that rank 0 holds"),
            (None, [False, None, None], "note", "no flock"),
        ],
    )
    def test_locks_that_do_not_reach_other_nodes_are_noted(
        self, first: bool | None, others: list[bool | None], status: str, words: str
    ) -> None:
        found = shared_files.exclusive(first, others)
        assert found.status == status and words in found.found

    @pytest.mark.parametrize(("ranks", "name"), [([0], "0"), ([2, 0, 1], "0-2"), ([0, 1, 3, 5, 6], "0-1, 3, 5-6")])
    def test_ranks_are_named_briefly(self, ranks: list[int], name: str) -> None:
        assert named(ranks) == name
