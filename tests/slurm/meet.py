"""A rank's program in the tests of launches: sums the ranks by an all-reduce, prints its place."""

import os

import torch

from pipeline import command_line
from pipeline.training import launch


def main() -> None:
    place = launch.read_launch(os.environ)
    total = torch.tensor([place.rank + 1], device=launch.initialise(place))
    torch.distributed.all_reduce(total)
    how = f"on {os.environ.get('SLURMD_NODENAME', 'here')} by {torch.distributed.get_backend()}"
    torch.distributed.destroy_process_group()
    # One write: the ranks share a file, and print would give the line's end apart.
    os.write(1, f"rank {place.rank} of {place.world_size} {how}: sum {total.item()}\n".encode())


if __name__ == "__main__":
    launch.leave_after(lambda: command_line.run(main))
