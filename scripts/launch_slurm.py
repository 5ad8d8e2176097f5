"""Train on a SLURM cluster: writes a run's sbatch file, runs/NAME/slurm/launch.sbatch, and submits it.

    python scripts/launch_slurm.py configs/paper/ccnews.yaml --nodes 4                  # 4 nodes of 8 GPUs, 24 hours
    python scripts/launch_slurm.py my.yaml optim.steps=5000 --nodes 1 --time 2-00:00:00 --partition gpu
    python scripts/launch_slurm.py my.yaml --nodes 4 --dry-run                          # print the file; submit nothing

The run stops by itself before its time is over, saves, and the job requeues itself until all steps are done. What
cannot work is refused here and not when the job's turn comes: mistakes in the config, a batch that so many ranks
cannot share, settings that the run did not begin with.
"""

import argparse
from pathlib import Path

from pkm.errors import exits_cleanly


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("config", help="a run's YAML file")
    add("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    add("--dry-run", action="store_true", help="print the sbatch file; write and submit nothing")
    add("--nodes", type=int, default=1, help="(default: %(default)s)")
    add("--gpus-per-node", type=int, default=8, help="a rank for each; 0 = one rank, on the CPU (default: %(default)s)")
    add("--time", default="24:00:00", help="of one turn of the job, as for sbatch (default: %(default)s)")
    add(
        "--margin",
        type=float,
        metavar="MINUTES",
        help="of it, to start and to save in (default: 15, at most a quarter)",
    )
    add("--cpus-per-task", type=int, metavar="CORES", help="of a node, shared by its ranks (default: 8 a rank)")
    add("--mem", help="memory of a node, for example 500G (default: the cluster's)")
    add("--partition")
    add("--account")
    add("--qos")
    add("--constraint")
    add("--job-name", help="(default: the run's name)")
    add("--output", help="log, appended to in every turn (default: runs/NAME/slurm/%%j.log, %%j = the job's id)")
    add("--sbatch", action="append", default=[], metavar="OPTION", help="any other: --sbatch=--reservation=week12")
    add("--venv", type=Path, help="virtual environment (default: the one that runs this)")
    add("--setup", action="append", default=[], metavar="LINE", help="shell line before the start: 'module load cuda'")
    add("--no-doctor", dest="doctor", action="store_false", help="train without scripts/doctor.py looking at the ranks")
    return parser


@exits_cleanly
def main() -> int:
    given = vars(parser().parse_intermixed_args())
    config, overrides = given.pop("config"), given.pop("overrides")
    dry_run = given.pop("dry_run")
    from pkm.slurm import launch

    given |= {key: tuple(given[key]) for key in ("sbatch", "setup")}
    job = launch.Job(**given | {"venv": given["venv"] or launch.environment()})
    for line in launch.launch(job, config, overrides, dry_run):
        print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
