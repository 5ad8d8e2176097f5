"""Write the JSON schemas that editors complete and check YAML files with.

    python scripts/schema.py                write them, below configs/ and data/
    python scripts/schema.py --check        only say whether they fit the code; exit status 1 if one does not

A file names its schema in its first line: # yaml-language-server: $schema=schema.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pkm.config.load import json_schema
from pkm.config.schema import Config
from pkm.errors import exits_cleanly
from pkm.experiments.grid import GridSettings, Scale
from pkm.prepare.settings import PrepareConfig

REPOSITORY = Path(__file__).resolve().parent.parent
SCHEMAS = {
    "configs/schema.json": Config,
    "configs/paper/grid.schema.json": GridSettings,
    "configs/paper/scale.schema.json": Scale,
    "data/schema.json": PrepareConfig,
}


@exits_cleanly
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a schema is stale")
    check = parser.parse_args().check
    stale = False
    for name, model in SCHEMAS.items():
        path, text = REPOSITORY / name, json.dumps(json_schema(model), indent=2, ensure_ascii=False) + "\n"
        if path.exists() and path.read_text(encoding="utf-8") == text:
            print(f"{name} is up to date")
        elif check:
            print(f"{name} is stale: run python scripts/schema.py")
            stale = True
        else:
            path.write_text(text, encoding="utf-8")
            print(f"{name} written")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
