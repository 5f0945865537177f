# SPDX-License-Identifier: MIT
"""Arrays of JAX on several devices, in a process of its own: JAX counts devices once."""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("jax")

FOUR = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}


@pytest.mark.parametrize("shardy", ["1", "0"], ids=["shardy", "gspmd"])
def test_four_devices_compute_what_one_does(shardy):
    tests = pathlib.Path(__file__).with_name("jax_on_four_devices.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    environment = os.environ | FOUR | {"JAX_USE_SHARDY_PARTITIONER": shardy}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
