"""The command of lm-evaluation-harness, with `--model pkm` besides; all its options are its own.

python scripts/harness.py run --model pkm --model_args run=runs/quickstart --tasks lambada_openai --limit 100
python scripts/harness.py ls tasks
"""

import importlib.util
import sys

from pkm.errors import UserError, exits_cleanly


@exits_cleanly
def main() -> int:
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("lm-evaluation-harness is not installed", "lm_eval", "pip install 'pkm[eval]'")
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    if "pkm" not in model_registry:
        model_registry.register("pkm", target="pkm.evaluation.harness:HarnessModel")  # imported when it is asked for
    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
