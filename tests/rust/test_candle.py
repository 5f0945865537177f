# SPDX-License-Identifier: MIT
"""sparseattn-candle, apart from the others: candle's own crates take minutes to compile."""
import os
import sys

from crates import SYSTEM, demand_crate, demand_tests

# Makes what candle's build scripts ask nvcc for, without a byte of code in it: enough where nothing is linked.
NVCC = """\
import pathlib, sys
asked = sys.argv[1:]
if "--version" in asked:
    print("nvcc", "", "", "Cuda compilation tools, release 13.0, V13.0.0", sep="\\n")
elif "--output-directory" in asked:
    folder = pathlib.Path(asked[asked.index("--output-directory") + 1])
    (folder / pathlib.Path(asked[-1]).with_suffix(".ptx").name).touch()
elif "-o" in asked:
    pathlib.Path(asked[asked.index("-o") + 1]).touch()
"""


def test_attention_and_gradients(cargo):
    demand_tests(cargo("test", *SYSTEM, cwd=demand_crate("sparseattn-candle")), 6)


def test_gpus_compile(cargo, tmp_path):
    """Tests of it need a GPU and candle's own kernels: see tests/README.md."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!{sys.executable}\n{NVCC}")
    nvcc.chmod(0o755)
    path = f"{nvcc.parent}{os.pathsep}{os.environ['PATH']}"
    cargo("check", "--tests", *SYSTEM, "--features", "cuda", cwd=demand_crate("sparseattn-candle"),
          PATH=path, CUDA_HOME=str(tmp_path), CUDA_COMPUTE_CAP="80", RUSTFLAGS="-Dwarnings")
