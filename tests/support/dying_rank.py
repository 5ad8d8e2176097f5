"""train.py on a rank of torchrun that dies the first time: `torchrun ... -m tests.support.dying_rank RANK POINT ARGUMENTS...`"""

import os
import sys


def main() -> int:
    rank, point, *arguments = sys.argv[1:]
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == rank:
        os.environ["PKM_FAULT"] = point
    sys.argv = ["train.py", *arguments]
    import train

    return train.main()


if __name__ == "__main__":
    raise SystemExit(main())
