"""Stands in for `evaluate.py RUN --facts` where only what a grid makes of it is tested: acts as act_facts.json above the run says.

{"part of a run's name": "fail" | "wait"}; a run that it does not name is asked. "wait" sends SIGTERM to who started it.
"""

import json
import os
import signal
import sys
from pathlib import Path

directory = Path(sys.argv[1])
assert "--facts" in sys.argv
acts = directory.parent / "act_facts.json"
act = next(
    (a for part, a in (json.loads(acts.read_text()) if acts.exists() else {}).items() if part in str(directory)), ""
)
with (directory.parent / "asked.txt").open("a") as file:
    file.write(directory.name + "\n")
if act == "fail":
    sys.exit("error: no names, places or numbers were found")
if act == "wait":
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()
groups = {"never": {"nll_per_token": 5.0}, "more often": {"nll_per_token": 4.25}}
(directory / "facts.json").write_text(json.dumps({"step": 20, "asked": 900, "groups": groups}))
