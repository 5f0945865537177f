# SPDX-License-Identifier: MIT
import crates
import pytest


@pytest.fixture(scope="session")
def cargo(build):
    """Runs cargo with the library of this build, offline; everything that it makes lies in build/rust."""
    crates.demand_cargo()
    where = {"SPARSEATTN_DIR": str(build), "SPARSEATTN_LIBRARY": str(build / "libsparseattn.so"),
             "LD_LIBRARY_PATH": str(build), "CARGO_TARGET_DIR": str(build.parent / "rust"), "CARGO_NET_OFFLINE": "true"}

    def call(*arguments, **environment):
        return crates.run("cargo", *arguments, **where | environment)
    return call
