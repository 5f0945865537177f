# SPDX-License-Identifier: MIT
"""The command line as a person meets it: what it prints, what it refuses, and how it stops."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import hear_ctrl_c, in_process

import sparseattn as sa
from sparseattn import bench, questions
from sparseattn.demo import speed


def start(*arguments, **more):
    return subprocess.Popen(
        [sys.executable, "-m", "sparseattn", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def command(*arguments):
    child = start(*arguments)
    out, err = child.communicate()
    return subprocess.CompletedProcess(arguments, child.returncode, out, err)


def test_help_names_every_command():
    said = command("--help").stdout
    assert all(f"\n    {name} " in said for name in ("demo", "show", "explain", "bench", "info", "selftest", "prefix"))
    assert "--pattern" in command("demo", "--help").stdout
    assert "in float32" in " ".join(command("selftest", "--help").stdout.split())  # so it does on a GPU, too


def test_version():
    assert command("--version").stdout == f"sparseattn {sa.version()}\n"


def test_selftest():
    done = command("selftest")
    assert done.returncode == 0 and done.stdout.count("ok ") == 6 and "WRONG" not in done.stdout


def test_prefix_holds_what_programs_link():
    prefix = Path(command("prefix").stdout.strip())
    assert (prefix / "include" / "sparseattn" / "sparseattn.h").is_file()


def test_show(tmp_path):
    pytest.importorskip("matplotlib")
    done = command("show", "causal & window(15,0)", "--tokens", "32/64", "--width", "16", "--out", str(tmp_path))
    lines = done.stdout.splitlines()
    assert lines[:-3] == sa.parse("causal & window(15,0)").drawing(sa.Extent(32, 64), 16, encoding="utf-8")
    assert lines[-3:-1] == ["causal & window(15,0)", "32 queries x 64 keys: 25 % kept, 16 to 16 keys a query"]
    assert Path(lines[-1]) == tmp_path / "patterns.png" and Path(lines[-1]).stat().st_size > 1000


def test_explain_is_the_plans():
    done = command("explain", "causal & window(255,0)", "--shape", "2x1/4096x32/8x64", "--threads", "1", "--backward")
    plan = sa.Plan(
        "causal & window(255,0)",
        batch=2,
        seq_q=1,
        seq_k=4096,
        heads_q=32,
        heads_kv=8,
        head_dim=64,
        backward=True,
        context=sa.Context("cpu", threads=1),
    )
    shown = [line for line in done.stdout.splitlines() if not line.startswith("machine")]
    assert shown == [line for line in plan.explain().splitlines() if not line.startswith("machine")] and len(shown) > 10


def test_explain_knows_dtypes():
    pytest.importorskip("ml_dtypes")
    assert "bf16" in command("explain", "causal", "--shape", "1x64x1x16", "--dtype", "bfloat16").stdout


def test_info():
    said = dict(line.split(maxsplit=1) for line in command("info").stdout.splitlines())
    assert said["libsparseattn"].startswith(sa.version()) and Path(said["library"]).is_file()
    assert said["GPUs"].isdigit() and "run here" in said["kernels"] and said["numpy"] != "not here"


def test_bench_prints_tables(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(speed, "ENOUGH", 0.0)
    options = ["--least", "16", "--most", "48", "--heads", "2/1", "--head-dim", "8", "--pattern", "window(3,0)"]
    done = in_process("bench", *options, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "milliseconds" in done.stdout and "times faster than a" in done.stdout and "48 tokens" in done.stdout
    assert done.stdout.count("a  causal") == 3 and done.stdout.count("b  window(3,0)") == 3
    assert {path.name for path in tmp_path.iterdir()} == {"speed.png", "speed.svg"}


def test_bench_writes_lines():
    options = ["--least", "16", "--most", "32", "--heads", "1", "--head-dim", "4", "--pattern", "causal", "--backward"]
    lines = [json.loads(line) for line in command("bench", *options, "--json").stdout.splitlines()]
    assert [line["tokens"] for line in lines] == [16, 32] and all(0 < line["seconds"] < 1 for line in lines)
    assert all(line["pattern"] == "causal" and "backward" in line["what"] for line in lines)


def test_lengths_double():
    assert bench.lengths(128, 4096) == [128, 256, 512, 1024, 2048, 4096]
    assert bench.lengths(100, 300) == [100, 200, 300] and bench.lengths(7, 7) == [7]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["show", "wind(3)"], "argument pattern: "),
        (["show", "causal", "--tokens", "0"], "is 0; accepted: a number from 1 on"),
        (["show", "causal", "--tokens", "1/2/3"], "is 1/2/3; accepted"),
        (["show", "causal", "--width", "1"], "is 1; accepted: 4 to 400"),
        (["explain", "causal", "--shape", "4096"], "accepted: batch x seq x heads x head_dim"),
        (["explain", "causal", "--shape", "1/2x4x1x8"], "one batch"),
        (["explain", "causal", "--shape", "1x4x3/2x8"], "problem.heads_kv"),
        (["explain", "causal", "--device", "tpu"], "is tpu; accepted: cpu, cuda, cuda:N"),
        (["explain", "csr(1)"], "argument pattern: "),
        (["bench", "--least", "64", "--most", "32"], "--least is 64; accepted: at most --most, 32"),
        (["bench", "--device", "cuda:99"], "--device cuda:99"),
        ([], "COMMAND"),
    ],
)
def test_what_cannot_be_is_a_sentence(arguments, says):
    bad = in_process(*arguments)
    assert bad.returncode in (1, 2) and says in bad.stderr


def test_what_cannot_be_is_no_traceback():
    bad = command("show", "wind(3)")
    assert bad.returncode == 2 and "argument pattern: " in bad.stderr and "Traceback" not in bad.stderr


def test_ctrl_c_ends_long_work():
    """A pass over 256K tokens takes minutes on any machine; what is left of it must not."""
    arguments = ["bench", "--least", "262144", "--most", "262144", "--pattern", "full", "--heads", "8"]
    child = start(*arguments, preexec_fn=hear_ctrl_c, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert child.stdout.readline().startswith("sparseattn ")  # what it says before the first pass
    time.sleep(1)
    assert child.poll() is None
    child.send_signal(signal.SIGINT)
    try:
        _, said = child.communicate(timeout=60)
    finally:
        child.kill()  # else it would compute for an hour
    assert child.returncode == 130 and "Stopped." in said and "Traceback" not in said


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
def test_a_closed_pipe_is_no_error():
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m sparseattn show causal | head -1"], capture_output=True, text=True
    )
    assert len(done.stdout.splitlines()) == 1 and done.stderr == ""


def test_shapes():
    assert questions.shape_argument("2x1/4096x32/8x192/128") == {
        "batch": 2,
        "seq_q": 1,
        "seq_k": 4096,
        "heads_q": 32,
        "heads_kv": 8,
        "head_dim": 192,
        "head_dim_v": 128,
    }
