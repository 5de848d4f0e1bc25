"""Benchmarks: each compares with something else on the same machine in the same run, and reports ratios.

    python -m tools.bench storage /big/disk/scratch      load, checkpoint, restore, export against copying the files

Every command prints a table with its goals; --json FILE writes it with the machine and the versions.
"""

import click

from tools.bench import conversion, rollouts, storage


@click.group(help=__doc__)
def main() -> None:
    pass


main.add_command(storage.main, "storage")
main.add_command(conversion.main, "conversion")
main.add_command(rollouts.main, "rollouts")

if __name__ == "__main__":
    main()
