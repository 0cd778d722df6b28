"""Make ``old_runs.tar.xz`` with the code of commit 62bf91a, and ``old_results.json`` with what that code got.

The commit must be installed in an environment of its own (git worktree add OLD 62bf91a, OLD/scripts/setup):
``OLD/.venv/bin/python tests/resume/make_old_runs.py`` takes about two minutes. Both files are in the repository: run it
again only to add a run. On another kind of CPU the last bits of the results are others; the test allows for that.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from old_runs import CUT, END, EVALUATED, FRAMEWORKS, RESUMED, config_of

from hvd_train.launch.local import command, environment  # isort: skip (its place in the old code)

HERE = Path(__file__).parent
# Kept of a run folder; environment.json tells of the machine.
KEPT = {"config.yaml", "metrics.jsonl", "summary.json", "checkpoints"}


def write_data(folder: Path) -> None:
    from sklearn.datasets import load_digits, load_iris

    iris, digits = load_iris(), load_digits()
    with open(folder / "iris.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "c", "d", "kind"])
        writer.writerows(
            [*row, iris.target_names[k]] for row, k in zip(iris.data.tolist(), iris.target.tolist(), strict=True)
        )
    x = np.random.default_rng(0).normal(size=(150, 3)).round(3)
    y = (x @ [1.0, -0.5, 0.25] + np.sin(x[:, 0])).round(4)
    with open(folder / "curve.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["x1", "x2", "x3", "y"])
        writer.writerows([*row, z] for row, z in zip(x.tolist(), y.tolist(), strict=True))
    images = digits.images.astype(np.uint8)
    parts = {"train": slice(0, 120), "val": slice(120, 180)}
    arrays = {f"{part}_x": images[s] for part, s in parts.items()}
    arrays |= {f"{part}_y": digits.target[s] for part, s in parts.items()}
    np.savez_compressed(folder / "digits.npz", **arrays)


def run_world(framework: str, folder: Path, ranks: int, work: list[dict]) -> dict[str, dict]:
    (folder / "work.json").write_text(json.dumps({framework: work}))
    line = command(ranks, "mpirun", [], program=[sys.executable, str(HERE / "world.py"), framework, str(folder)])
    subprocess.run(line, env=environment(), check=True, timeout=900)
    results = {
        case["name"]: json.loads((folder / f"results/{framework}-{case['name']}.json").read_text()) for case in work
    }
    shutil.rmtree(folder / "results")
    return results


def main() -> None:
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "runs"
        folder.mkdir()
        write_data(folder)
        for framework in FRAMEWORKS:
            script = {"pytorch": "torch_script", "tensorflow": "keras_script"}[framework]
            suffix = {"pytorch": "ckpt", "tensorflow": "keras"}[framework]
            first = [{"kind": "fit", "name": name, "config": config_of(framework, name, CUT)} for name in RESUMED]
            first.append({"kind": script, "name": "script", "save": f"{framework}/script.{suffix}"})
            run_world(framework, folder, 2, first)
            run_world(
                framework,
                folder,
                1,
                [{"kind": "fit", "name": name, "config": config_of(framework, name)} for name in EVALUATED],
            )
            for ranks in (2, 1):
                again = Path(temporary) / f"{framework}-{ranks}"
                shutil.copytree(folder, again)
                work = [
                    {"kind": "fit", "name": name, "config": config_of(framework, name, END), "resume": "last"}
                    for name in RESUMED
                ]
                there = {"load": f"{framework}/script.{suffix}", "save": f"{framework}/again.{suffix}"}
                work.append({"kind": script, "name": "script", **there})
                if ranks == 1:
                    work += [{"kind": "evaluate", "name": name, "run_dir": f"{framework}/{name}"} for name in EVALUATED]
                for name, result in run_world(framework, again, ranks, work).items():
                    del result["output"]
                    results[f"{framework} {name} {ranks}"] = result
        (folder / "work.json").unlink()
        for path in folder.glob("*/*/*"):
            if path.name not in KEPT:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        with tarfile.open(HERE / "old_runs.tar.xz", "w:xz") as archive:
            archive.add(folder, ".", filter=_anonymous)
    (HERE / "old_results.json").write_text(json.dumps(results, indent=1) + "\n")


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main()
