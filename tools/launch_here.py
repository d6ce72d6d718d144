"""Starts one process a rank on this machine: torchrun, except that it ends as its ranks do.

    python tools/launch_here.py --ranks 2 -m pipeline.train configs/demo.yaml

torchrun itself always ends with 1, and puts a traceback of its own under the line that says what was wrong.
"""

from __future__ import annotations

import argparse
import logging
import sys

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True, help="how many processes")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module, as in python -m")
    parser.add_argument("program", help="a Python file or module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own")
    arguments = parser.parse_args()
    if arguments.ranks < 1:
        parser.error(f"--ranks: expected 1 or more, found {arguments.ranks}")

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={arguments.ranks}"]
    options += ["--module"] if arguments.module else []
    # torchrun takes abbreviations of its own flags out of the program's arguments, hence the --.
    try:
        torchrun.run(torchrun.parse_args([*options, "--", arguments.program, *arguments.arguments]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"error: rank {rank} was killed by signal {-failure.exitcode}", file=sys.stderr)
            return 128 - failure.exitcode
        return failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
