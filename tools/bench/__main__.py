"""Benchmarks: each compares with something else on the same machine in the same run, and reports ratios.

    bash tools/setup_bench.sh                            PyTorch and transformers, in an environment of their own
    python -m tools.bench train-step --model 30m         the update against PyTorch's
    python -m tools.bench decode --model 30m             the JAX engine against transformers.generate
    python -m tools.bench growth OUT                     time and memory against length, G, model, devices: figures
    python -m tools.bench startup                        compiling again, with the cache of the first start
    python -m tools.bench verifier FILE                  answers a second, and what answers that hang cost
    python -m tools.bench overhead MODEL FILE            a step outside generating and updating
    python -m tools.bench sync MODEL --platform cpu      new weights to a vLLM server, against cp
    python -m tools.bench rollouts MODEL --platform cpu  the vLLM engine against a bare load generator
    python -m tools.bench storage /big/disk/scratch      load, checkpoint, restore, export against copying the files

Every command prints a table with its goals; --json FILE writes it with the machine and the versions.
"""

import click

from tools.bench import conversion, decode, growth, overhead, rollouts, startup, storage, sync, train_step, verifier


@click.group(help=__doc__)
def main() -> None:
    pass


main.add_command(train_step.main, "train-step")
main.add_command(decode.main, "decode")
main.add_command(growth.main, "growth")
main.add_command(startup.main, "startup")
main.add_command(verifier.main, "verifier")
main.add_command(overhead.main, "overhead")
main.add_command(sync.main, "sync")
main.add_command(rollouts.main, "rollouts")
main.add_command(storage.main, "storage")
main.add_command(conversion.main, "conversion")

if __name__ == "__main__":
    main()
