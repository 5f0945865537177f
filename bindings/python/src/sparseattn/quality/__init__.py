# SPDX-License-Identifier: MIT
"""What a pattern costs a language model that was trained without it.

`python -m sparseattn quality --pattern TEXT --text FILE` reads a text twice, with dense attention and with the pattern
in all layers. The pieces serve other programs, too (bench/quality):

beside.py   reading beside dense attention: losses, KL, output error, mass kept
matrix.py   weights rounded to bfloat16, for CPUs whose products of them are faster
command.py  the command
"""
