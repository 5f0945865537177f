# SPDX-License-Identifier: MIT
# Finds nvcc and enables CUDA. SPATTN_HAVE_CUDA says whether; SPATTN_CUDART is the runtime to link, static, so that the
# library loads where there is no driver.
set(SPATTN_CUDA AUTO CACHE STRING "AUTO (on when an nvcc is found), ON (error if none), OFF; EMULATED: kernels run on the CPU, for tests")
set_property(CACHE SPATTN_CUDA PROPERTY STRINGS AUTO ON OFF EMULATED)
set(SPATTN_CUDA_ROOT "" CACHE PATH "Toolkit with bin/nvcc: /usr/local/cuda, or <site-packages>/nvidia/cu13")
set(SPATTN_HAVE_CUDA OFF)
if(SPATTN_CUDA STREQUAL "OFF" OR (SPATTN_SANITIZE AND SPATTN_CUDA STREQUAL "AUTO"))
  return()
endif()

# In a folder that was named, where CMake's own variables say, on the PATH, beside the usual toolkit, in PyPI's wheels of
# the checkout's virtual environment or of the Python at hand.
function(spattn_find_nvcc result)
  foreach(given "${SPATTN_CUDA_ROOT}/bin/nvcc" "${CMAKE_CUDA_COMPILER}" "$ENV{CUDACXX}")
    if(IS_ABSOLUTE "${given}" AND EXISTS "${given}" AND NOT given STREQUAL "/bin/nvcc")
      set(${result} "${given}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  find_program(SPATTN_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
  mark_as_advanced(SPATTN_NVCC)
  if(SPATTN_NVCC)
    set(${result} "${SPATTN_NVCC}" PARENT_SCOPE)
    return()
  endif()
  foreach(python "${PROJECT_SOURCE_DIR}/.venv/bin/python3" python3)
    execute_process(COMMAND "${python}" -c [=[
import glob, nvidia
print(next(f for base in nvidia.__path__ for f in sorted(glob.glob(base + "/cu1*/bin/nvcc"), reverse=True)))]=]
      OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed)
      set(${result} "${found}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

spattn_find_nvcc(nvcc)
if(NOT nvcc)
  if(NOT SPATTN_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "SPATTN_CUDA=${SPATTN_CUDA}, but no nvcc: pip install \"cuda-toolkit[nvcc,cudart,cccl]==13.0.*\", or say "
                        "where it is with -DSPATTN_CUDA_ROOT=")
  endif()
  message(STATUS "CUDA backend: off, no nvcc found")
  return()
endif()

file(REAL_PATH "${nvcc}" root)
cmake_path(GET root PARENT_PATH root)
cmake_path(GET root PARENT_PATH root)
set(SPATTN_CUDA_INCLUDE ${root}/include)
set(SPATTN_HAVE_CUDA ON)
if(SPATTN_CUDA STREQUAL "EMULATED")
  set(SPATTN_CUDART $<TARGET_LINKER_FILE:spattn_emulator>)  # tests/emulator; no part of what is installed
  message(STATUS "CUDA backend: emulated")
  return()
endif()
find_library(SPATTN_CUDART cudart_static PATHS ${root} PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib NO_DEFAULT_PATH REQUIRED)
cmake_path(GET SPATTN_CUDART PARENT_PATH libraries)
# nvcc looks in lib64; the wheels have lib. Only the compiler check links through nvcc, so only configuring needs this.
set(ENV{NVCC_APPEND_FLAGS} "$ENV{NVCC_APPEND_FLAGS} -L${libraries}")
set(CMAKE_CUDA_COMPILER "${nvcc}")
if(NOT CMAKE_CUDA_HOST_COMPILER)
  set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
endif()
set(CMAKE_CUDA_ARCHITECTURES OFF)  # each folder of kernels brings its own
set(CMAKE_CUDA_RUNTIME_LIBRARY None)
enable_language(CUDA)
# CMake 3.25 does not know nvcc's flag for C++20.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
if(CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
endif()
message(STATUS "CUDA backend: on, ${CMAKE_CUDA_COMPILER_VERSION} (${nvcc})")
