# SPDX-License-Identifier: MIT
"""What every line says of its run, and where lines go."""
import datetime
import fnmatch
import json
import pathlib
import re
import subprocess

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]


def shell(command):
    return subprocess.run(command, shell=True, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def origin(toolkit):
    """What every line says of its run."""
    hashed = "find include src cuda -type f | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-12"
    return {"source": shell(hashed), "gpu": torch.cuda.get_device_name(),
            "driver": shell("nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1"),
            "toolkit": f"nvcc {toolkit}, torch {torch.__version__}",
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds")}


def digits(x, count=4):
    """The number as a line has it."""
    return float(f"{x:.{count}g}")


def first_line(error):
    return (str(error).splitlines() or [repr(error)])[0][:120]


def results_file(folder, suffix=""):
    gpu = torch.cuda.get_device_name().lower().replace("nvidia ", "")
    file = folder / (re.sub("[^a-z0-9]", "_", gpu) + suffix + ".jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def write_cases(options, suffix, cases, run_case, describe):
    """Runs the cases that --case names: each makes a line, which goes to the results and, described, to the terminal."""
    common = origin(options.toolkit)
    with results_file(options.out, suffix).open("w") as stream:
        for case in cases:
            if fnmatch.fnmatch(case.name, options.case):
                line = run_case(case)
                stream.write(json.dumps({**line, **common}) + "\n")
                stream.flush()
                print(describe(line), flush=True)
