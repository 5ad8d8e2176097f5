"""Stands in for train.py where only what a grid makes of it is tested: it acts as runs/acts.json says, without torch.

{"part of a run's name": "finish" | "fail" | "error" | "die" | "wait" | "deaf" | "stop"}; a run that it does not name finishes.
"wait" and "deaf" send SIGTERM to who started them once they are at step 3; what they get back ends the first and makes the
second one send another.
"""

import json
import os
import signal
import sys
from pathlib import Path

settings = dict(argument.split("=", 1) for argument in sys.argv[2:])
runs = Path(settings["runs"].strip('"'))
directory = runs / settings["name"]
steps = int(settings.get("optim.steps", 20))
acts = json.loads((runs / "acts.json").read_text())
act = next((act for part, act in acts.items() if part in settings["name"]), "finish")


def status(state: str, step: int, reason: str) -> None:
    said = {"state": state, "step": step, "reason": reason, "pid": os.getpid()}
    (directory / "status.json").write_text(json.dumps(said))


def stopped(number: int) -> None:
    if act == "wait":
        (directory / "checkpoints").mkdir()
        (directory / "checkpoints" / "latest").write_text("step-0000003\n")
        status("stopped", 3, signal.Signals(number).name)
        os._exit(0)
    os.kill(os.getppid(), signal.SIGTERM)


with (runs / "begun.txt").open("a") as file:
    environment = {key: os.environ.get(key) for key in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")}
    file.write(json.dumps({"name": settings["name"], **environment}) + "\n")
print("this is said by", settings["name"])
if act == "finish":
    (directory / "report.json").write_text(json.dumps({"step": steps, "evaluation": {"perplexity": 12.5}}))
    status("finished", steps, "all steps done")
elif act == "fail":
    status("failed", 7, "the loss is not finite")
    sys.exit(1)
elif act == "error":
    print("some warning\nerror: the settings are wrong\n  fix: write others", file=sys.stderr)
    sys.exit(2)
elif act == "die":
    os.kill(os.getpid(), signal.SIGKILL)
elif act == "stop":
    status("stopped", 5, "time limit")
else:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    record = {"kind": "train", "step": 3, "loss": 2.0, "tokens_per_second": 100.0}
    (directory / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    os.kill(os.getppid(), signal.SIGTERM)
    while True:
        stopped(signal.sigwait({signal.SIGTERM}))
