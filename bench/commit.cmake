# SPDX-License-Identifier: MIT
cmake_minimum_required(VERSION 3.25)
# Writes commit.h with the commit of the source tree; leaves the file alone where nothing changed, so nothing is
# rebuilt.
execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=12 --exclude *
                OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT commit)
  set(commit unknown)
endif()
file(CONFIGURE OUTPUT ${HEADER} CONTENT "#define SPATTN_BENCH_COMMIT \"@commit@\"\n" @ONLY)
