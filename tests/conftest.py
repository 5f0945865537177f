# SPDX-License-Identifier: MIT
"""What the Python tests are told by tests/run, or by hand:  pytest tests --build build/release"""
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def pytest_addoption(parser):
    parser.addoption("--build", default=str(ROOT / "build" / "release"), help="build folder of the library under test")


@pytest.fixture(scope="session")
def build(request):
    path = pathlib.Path(request.config.getoption("--build")).resolve()
    assert (path / "CMakeCache.txt").exists(), f"{path} is no build folder: cmake --preset release, or --build FOLDER"
    return path


@pytest.fixture(scope="session")
def library_file(build):
    return build / "libsparseattn.so"


@pytest.fixture(scope="session")
def library(library_file):
    from capi import Library
    return Library(library_file)
