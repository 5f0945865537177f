# SPDX-License-Identifier: MIT
"""scikit-build-core, which also asks PyPI for nvcc: where the build was told to have CUDA, and there is none.

pip install sparseattn -Ccmake.define.SPATTN_CUDA=ON    compiles for GPUs; without it, only where an nvcc is found.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from scikit_build_core import build as skbuild
from scikit_build_core.build import (  # noqa: F401, the other hooks as they are
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
)

CUDA = ["cuda-toolkit[nvcc,cudart,cccl]==13.0.*"]


def wants_cuda(settings: dict[str, Any]) -> bool:
    """Whether SPATTN_CUDA was set to ON, in one of the ways in which scikit-build-core takes it."""
    given = [settings.get(f"{prefix}cmake.define.SPATTN_CUDA") for prefix in ("", "skbuild.")]
    arguments = [settings.get("cmake.args", ""), os.environ.get("CMAKE_ARGS", "")]
    return "ON" in given or any("-DSPATTN_CUDA=ON" in str(text) for text in arguments)


def has_nvcc(settings: dict[str, Any]) -> bool:
    """Whether cuda/toolkit.cmake would find one that is not PyPI's."""
    named = [settings.get("cmake.define.SPATTN_CUDA_ROOT"), os.environ.get("CUDACXX")]
    return any(named) or any(map(shutil.which, ("nvcc", "/usr/local/cuda/bin/nvcc")))


def _more(config_settings: dict[str, Any] | None) -> list[str]:
    settings = config_settings or {}
    return CUDA if wants_cuda(settings) and not has_nvcc(settings) else []


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return skbuild.get_requires_for_build_wheel(config_settings) + _more(config_settings)


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return skbuild.get_requires_for_build_editable(config_settings) + _more(config_settings)
