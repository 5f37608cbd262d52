"""Train the same model with and without the strategy, and print the losses side by side.

    python examples/compare.py --stages 2 --steps 30

Runs ``train_gpt.py`` once with ``--plain`` and once over pipeline stages, from the same seed, and reads both
logs. In float64 (the default) the two differ by rounding alone.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from train_gpt import read_losses


def train(out: Path, *options: str) -> None:
    """One run of train_gpt.py; its output is shown only when it fails."""
    command = [sys.executable, str(Path(__file__).with_name("train_gpt.py")), "--out", str(out), *options]
    print("running: " + " ".join(["train_gpt.py", *options]), flush=True)
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode:
        sys.exit(f"{result.stdout}\ntrain_gpt.py ended with exit code {result.returncode}")


def show(name: str, plain: dict[int, float], staged: dict[int, float]) -> float:
    """Print one column of both logs and return the largest difference."""
    if plain.keys() != staged.keys():
        sys.exit(f"{name} was logged at other steps: {sorted(plain)} and {sorted(staged)}")
    differences = {step: abs(plain[step] - staged[step]) for step in plain}
    print(f"\n{name:>10} {'plain':>14} {'pipeline':>14} {'difference':>12}")
    for step, difference in differences.items():
        print(f"{step + 1:>10} {plain[step]:>14.10f} {staged[step]:>14.10f} {difference:>12.1e}")
    return max(differences.values())


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2, help="number of pipeline stages (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="pieces of a batch (default: %(default)s)")
    parser.add_argument("--schedule", default="1f1b", help="order of the work (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--precision", default="64-true", help="as the Trainer takes it (default: %(default)s)")
    parser.add_argument("--tolerance", type=float, help="end with exit code 1 when a difference is larger")
    return parser.parse_args()


def main() -> None:
    """Run both, print both."""
    args = parse_args()
    common = [
        "--steps",
        str(args.steps),
        "--precision",
        args.precision,
        "--width",
        "64",
        "--batch-size",
        "32",
    ]
    pipeline = [
        "--stages",
        str(args.stages),
        "--microbatches",
        str(args.microbatches),
        "--schedule",
        args.schedule,
    ]
    with tempfile.TemporaryDirectory() as folder:
        plain, staged = Path(folder, "plain"), Path(folder, "pipeline")
        train(plain, "--plain", *common)
        train(staged, *pipeline, *common)
        worst = max(
            show(name, read_losses(plain, name), read_losses(staged, name)) for name in ("train_loss", "val_loss")
        )
    print(f"\nlargest difference: {worst:.1e}")
    if args.tolerance is not None and worst > args.tolerance:
        sys.exit(f"that is more than {args.tolerance:.1e}")


if __name__ == "__main__":
    main()
